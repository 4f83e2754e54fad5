"""The lines of a run's metrics.jsonl, as they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llm_fed.basics import checksum
from llm_fed.basics.documents import load_json
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import read_file
from llm_fed.runs import shapes


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file of a run folder, which holds what llm_fed writes there. ValueError, OSError,
    RecursionError: it does not, or cannot be read."""
    values = checksum.checked(load_json(read_file(path)))
    shapes.check(path.name, values)
    return values


def recall(path: Path, kind: type[Exception] = RunError) -> dict[str, Any] | None:
    """See `read_object`; None where there is no such file. RunError, or another `kind`: it is damaged."""
    try:
        return read_object(path) if path.exists() else None
    except (OSError, ValueError, RecursionError) as error:
        raise kind(f"{path} is damaged: {error}; put it back as it was, or llm-fed run --fresh starts again") from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl or another JSONL file of a run (what a kill has left of a last line is left out).
    UserError: a line is damaged; which."""
    if not path.exists():
        return []
    records = []
    try:
        *whole, _ = read_file(path).split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; put it back as it was") from error
    for number, line in enumerate(whole, 1):
        if not line:
            continue
        try:
            record = load_json(line)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
            shapes.check(path.name, record)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}, is damaged: {error}; put the file back as it was, or start again with "
                "llm-fed run --fresh"
            ) from error
        records.append(record)
    return records


def comparable(lines: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Of the lines of a metrics.jsonl those since scores were last made in another way (eval.metric, say)."""
    return lines[max((index for index, line in enumerate(lines) if line["kind"] == "search anew"), default=0) :]


def timed_rounds(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's timing.jsonl that say how long a round took; others say it of what comes before the rounds
    and after them. UserError: a line is damaged."""
    return [line for line in read_records(folder / "timing.jsonl") if "round" in line]


def digest(path: Path, size: int | None = None) -> str:
    """The SHA-256 of the first `size` bytes of a file, or of all; a file that does not exist is empty."""
    if not path.exists():
        return hashlib.sha256().hexdigest()
    return hashlib.sha256(read_file(path, 0, size)).hexdigest()


def check_beginning(path: Path, mark: int, expected: str | None = None) -> int:
    """The length of a metrics.jsonl or digests.jsonl, of which a checkpoint saw the first `mark` bytes. RunError: the
    file is shorter now, or holds something else there. `expected`: what `digest` said of them, where it was kept."""
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is damaged: it is no file; put it back as it was, or start again with --fresh")
    if (length := path.stat().st_size if path.exists() else 0) < mark:
        raise RunError(
            f"{path} has {length} bytes, but {mark} when the checkpoint was written: it was truncated. Start again "
            "with --fresh."
        )
    if mark and expected is not None and digest(path, mark) != expected:
        raise RunError(
            f"{path} is damaged: its first {mark} bytes are not what they were at the checkpoint. "
            "Put the file back as it was, or start again with --fresh."
        )
    return length


def time_of_day() -> str:
    """Now, by the clocks of all countries (UTC), to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
