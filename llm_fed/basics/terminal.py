"""What is printed: it reaches its reader as far as that is possible, and ends no run where it is not.

A letter that the terminal's encoding lacks comes out as an escape. When whoever reads has gone (`| head`, a closed
session), or the disk of a log file is full, the work goes on, and the rest of the text is dropped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from llm_fed.basics.errors import printable

_NAME = 10  # characters of a name that are always shown


def shown(text: str, encoding: str) -> str:
    """The text with an escape instead of every letter that the encoding lacks."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


@dataclass(eq=False)
class Lasting:
    """A text stream that takes everything: what cannot be written is dropped."""

    stream: Any
    failure: Exception | None = None  # why something was dropped

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write bytes into it where the encoding is ASCII
            raise AttributeError(name)
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            self.write(shown(text, self.stream.encoding))
        except (OSError, ValueError) as error:  # of a file that is closed Python says ValueError
            self.failure = error
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self.failure = error

    @property
    def reader_left(self) -> bool:
        return isinstance(self.failure, BrokenPipeError)  # of a pipe that nobody reads any more

    def abandon(self) -> None:
        """Let what is still to be written vanish, so that Python does not try it again when it ends."""
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        with suppress(OSError, ValueError):
            self.stream.flush()


@contextmanager
def lasting_streams() -> Iterator[Lasting]:
    """Within, standard output (which one gets) and error take everything, also where there were none."""
    before = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    for name, stream in before.items():
        if stream is None:  # closed; the next file that is opened would otherwise have its number
            before[name] = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            setattr(sys, name, before[name])
    out, err = Lasting(sys.stdout), Lasting(sys.stderr)
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield out
    finally:
        for stream in (out, err):
            stream.flush()
            if stream.failure is not None:
                stream.abandon()
        sys.stdout, sys.stderr = before["stdout"], before["stderr"]


def table_of_numbers(title: str, first: str, columns: Sequence[str]) -> Table:
    """An empty table: names, which are cut where the terminal is narrow, never to nothing, and columns of numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="ellipsis", min_width=_NAME)
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    return table


class Terminal(Console):
    """A console for text of anybody's: nothing in it is markup, moves the cursor, or is cut to fit."""

    def __init__(self, **settings: Any):
        usual = {"highlight": False, "soft_wrap": True, "markup": False, "emoji": False, "force_jupyter": False}
        # Never rich's own way in notebooks, which makes a block of HTML of each line; and what a kernel writes to may
        # call itself a terminal, though no bar can move there.
        if "ipykernel" in sys.modules:
            usual["force_terminal"] = False
        super().__init__(**{**usual, **settings})

    @property
    def file(self) -> Any:
        """Where to: standard output or error as they are at the moment."""
        stream = super().file
        return stream if isinstance(stream, Lasting) else Lasting(stream)

    @file.setter
    def file(self, stream: Any) -> None:
        self._file = stream

    def render_str(self, text: str, **settings: Any) -> Text:
        """As rich does, after what the encoding lacks was replaced, so that tables are as wide as they seem."""
        return super().render_str(shown(printable(text), self.encoding), **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """As rich does, but a table is never narrower than its longest words, which would lose their ends."""
        for table in objects:
            if isinstance(table, Table):
                least = Measurement.get(self, self.options.update(width=10**6), table).minimum
                table.width = least if least > self.width else table.width
        super().print(*objects, **settings)
