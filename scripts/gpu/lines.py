"""results.jsonl: a line per figure, with the keys step, card, torch, commit and figure.

A figure is an object: `case` names its row in the step's table, `tiny` says whether its shapes were tiny, and the other
keys are what was measured, or `error` says why nothing was, or `begun` that it was begun and not ended yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Line:
    """A line of results.jsonl."""

    step: str
    card: str
    torch: str
    commit: str
    figure: dict[str, Any]

    @property
    def case(self) -> str:
        return str(self.figure["case"])

    @property
    def is_measured(self) -> bool:
        """Whether it has figures."""
        return not self.figure.keys() & {"error", "begun"}

    def measures_like(self, other: Line) -> bool:
        """Whether both are of one case under equal conditions."""
        mine, others = (
            (line.step, line.card, line.torch, line.commit, line.case, line.figure.get("tiny", False))
            for line in (self, other)
        )
        return mine == others


def read(path: Path) -> Iterator[Line]:
    """The lines of a file, none where there is no file. A last line that a stopped process left half-written is not
    one."""
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield Line(**json.loads(text))
        except (ValueError, TypeError) as error:
            if text.endswith("}"):
                raise SystemExit(f"{path}: this line has not the keys of a figure: {text[:200]}") from error


def append(path: Path, line: Line) -> None:
    """On a line of its own, also behind one that was left half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        at = file.seek(0, 2)
        file.seek(max(0, at - 1))
        broken = at > 0 and file.read(1) != b"\n"
        file.write((b"\n" if broken else b"") + json.dumps(asdict(line)).encode() + b"\n")
