"""begun.jsonl, beside results.jsonl: a line when a case begins and one when it ends, so that what was cut off between
them is known. They have the keys of results.jsonl; `begun` of a figure is 1 or -1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lines import Line, append, read


class Begun:
    """The lines of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = list(read(path))

    def cut_off(self, line: Line) -> int:
        """How often a case began and did not end."""
        return sum(each.figure["begun"] for each in self._known if each.measures_like(line))

    @contextmanager
    def noted(self, line: Line) -> Iterator[None]:
        """A case ends also where it fails, but not where this process does."""
        append(self._path, replace(line, figure={**line.figure, "begun": 1}))
        try:
            yield
        except Exception:
            append(self._path, replace(line, figure={**line.figure, "begun": -1}))
            raise
        append(self._path, replace(line, figure={**line.figure, "begun": -1}))
