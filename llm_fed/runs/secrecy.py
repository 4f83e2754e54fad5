"""secret: the 256 bits from which a run with privacy draws its noise, its batches and whom it asks. No other file holds
them; environment.json holds a mark, by which they are known again."""

from __future__ import annotations

import re
from pathlib import Path

from llm_fed.basics.errors import RunError
from llm_fed.basics.files import read_file
from llm_fed.basics.rng import Secret
from llm_fed.runs.records import recall

FILE = "secret"


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
    """Why the noise of a run cannot be drawn again; empty where it can. RunError: its secret, or what knows it again,
    is damaged."""
    if (found := read(folder)) is None:
        return f"{folder / FILE}, from which its noise was drawn, is not there"
    mark = (recall(folder / "environment.json") or {}).get("secret", found.mark)
    return "" if mark == found.mark else f"{folder / FILE} is that of another run"
