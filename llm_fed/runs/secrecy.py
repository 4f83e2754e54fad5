"""secret: the 256 bits from which a run with privacy draws its noise, its batches and whom it asks. No other file holds
them; environment.json holds a mark, by which they are known again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import read_file
from llm_fed.basics.rng import Secret
from llm_fed.runs.records import read_object

FILE = "secret"
VOID = (
    "holds a run with privacy of an earlier version, and its epsilon is void: noise and batches were drawn from the "
    "seed, which its cards print, so anybody can draw them again and subtract them. Take back what was handed on of "
    "it, and train it again with --fresh"
)


def read(folder: Path) -> Secret | None:
    """The secret of a run folder; None where it is not there. RunError: it is damaged."""
    try:
        text = read_file(folder / FILE).decode().strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / FILE} cannot be read: {error}") from error
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise RunError(f"{folder / FILE} is damaged: it holds no 64 hexadecimal digits; put a copy back")
    return Secret(text)


def missing(folder: Path) -> str:
    """Why the noise of a run cannot be drawn again; empty where it can. RunError: its secret is damaged."""
    mark, found = _mark(folder), read(folder)
    if found is None:
        return f"{folder / FILE}, from which its noise was drawn, is not there"
    return f"{folder / FILE} is that of another run" if mark and mark != found.mark else ""


def check(folder: Path, saved: Mapping[str, Any]) -> None:
    """Refuse a run of an earlier version whose configuration `saved` requested privacy. UserError: that it is void, and
    why."""
    if saved["privacy"]["clip"] is not None and _mark(folder) == "":
        raise UserError(f"{folder} {VOID}")


def _mark(folder: Path) -> str | None:
    """That of the secret with which the run began: empty where an earlier version wrote environment.json, None where
    that is not there, or damaged."""
    try:
        return str(read_object(folder / "environment.json").get("secret", ""))
    except (OSError, ValueError, RecursionError):
        return None
