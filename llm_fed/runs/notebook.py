"""Progress in a notebook: one line that is replaced as the work goes on, under which all lines can be unfolded."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from llm_fed.basics.errors import printable

MOST = 500  # lines that are kept; of more the last


def display_of_notebook() -> Any:
    """IPython's `display`, if this process is the kernel of a notebook; None elsewhere, in its terminal, too."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return sys.modules["IPython"].display.display if hasattr(shell, "kernel") else None


class Panel:
    """What a cell shows of a run.

    Args:
        display: as IPython's.
    """

    def __init__(self, display: Any):
        self._display, self._handle = display, None
        self._lines: list[str] = []
        self._lasting: list[str] = []
        self._now = ""

    def add(self, line: str, lasting: bool = False) -> None:
        """A further line, which is now the one to be seen.

        Args:
            lasting: whether it stays to be seen, as what went wrong.
        """
        self._lines = [*self._lines, line][-MOST:]
        if lasting:
            self._lasting.append(line)
        self.show(line)

    def show(self, now: str) -> None:
        """Replace the line that is to be seen."""
        if now != self._now or self._handle is None:
            self._now = now
            bundle = {"text/plain": "\n".join([*self._lasting, now]), "text/html": self._html()}
            if self._handle is None:
                self._handle = self._display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)

    def _html(self) -> str:
        lasting = "".join(f"<div>{escape(printable(line))}</div>" for line in self._lasting)
        log = escape("\n".join(map(printable, self._lines)))
        return f"{lasting}<details><summary>{escape(printable(self._now))}</summary><pre>{log}</pre></details>"
