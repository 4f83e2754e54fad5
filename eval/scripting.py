"""What the scripts in scripts/ share: tables as CSV, and errors as the command line prints them."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import write_file


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """A CSV file; its folder is made, and returned."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.getvalue().encode())
    return path.parent


def spread(values: Sequence[float]) -> str:
    """The mean of the draws, and their standard deviation where there are several."""
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


@contextmanager
def plain_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """A mistake of the user's ends the script with its message and exit code 2."""
    try:
        yield
    except (UserError, RunError) as error:
        parser.error(str(error))
