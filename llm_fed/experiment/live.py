"""The report of a run while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from llm_fed.basics.errors import one_line
from llm_fed.eval.report import write_report

EVERY = 60.0  # seconds between two reports, at least
SHARE = 50  # and at least so many times what one takes, as pictures are drawn for it


class LiveReport:
    """Writes a run's report anew after a round, where some time has passed since the last one.

    Args:
        note: is told once where it cannot be written, which is no reason to end a run.
        clock: seconds that pass.
    """

    def __init__(self, folder: Path, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._folder, self._note, self._clock = folder, note, clock
        self._written, self._took, self._failed = clock(), 0.0, False

    def round_ended(self) -> None:
        began = self._clock()
        if self._failed or began - self._written < max(EVERY, SHARE * self._took):
            return
        try:
            write_report(self._folder, goes_on=True)
        except Exception as error:  # of any kind: the report at the end says what is wrong
            self._failed = True
            self._note(f"the report is not written while the run goes on: {one_line(f'{error}')}")
        self._written = self._clock()
        self._took = self._written - began
