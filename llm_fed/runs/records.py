"""The lines of a run's metrics.jsonl, as they are read."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llm_fed.errors import RunError, UserError


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl or timing.jsonl (an unfinished last line of a killed run is left out).

    Raises:
        UserError: a line is damaged; which.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}, is damaged: {error}; put the file back as it was, or start again with "
                "llm-fed run --fresh"
            ) from error
        records.append(record)
    return records


def timed_rounds(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's timing.jsonl that say how long a round took; others say it of what comes before the rounds
    and after them.

    Raises:
        UserError: a line is damaged.
    """
    return [line for line in read_records(folder / "timing.jsonl") if "round" in line]


def digest(path: Path, size: int | None = None) -> str:
    """The SHA-256 of the first `size` bytes of a file, or of all; a file that does not exist is empty."""
    if not path.exists():
        return hashlib.sha256().hexdigest()
    with open(path, "rb") as file:
        return hashlib.sha256(file.read() if size is None else file.read(size)).hexdigest()


def check_beginning(path: Path, mark: int, expected: str | None) -> int:
    """The length of a metrics.jsonl, of which a checkpoint saw the first `mark` bytes.

    Args:
        expected: what `digest` said of them; None: a checkpoint of an older version, which does not know.

    Raises:
        RunError: the file is shorter now, or holds something else there.
    """
    length = path.stat().st_size if path.exists() else 0
    if length < mark:
        raise RunError(
            f"{path} has {length} bytes, but {mark} when the checkpoint was written: it was truncated. Start again "
            "with --fresh."
        )
    if expected is not None and digest(path, mark) != expected:
        raise RunError(
            f"{path} is damaged: its first {mark} bytes are not what they were at the checkpoint. "
            "Put the file back as it was, or start again with --fresh."
        )
    return length


def time_of_day() -> str:
    """Now, by the clocks of all countries (UTC), to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
