"""What one machine of a network keeps of its rows for each run, so that it tests on none that it trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from llm_fed.basics import checksum
from llm_fed.basics.files import write_file
from llm_fed.experiment import splits
from llm_fed.tasks.record import Record, together


class RowsAtNode:
    """What this machine knows of its rows in a run.

    Args:
        home: the folder of its memories.
        runs: the token of the run, and of those that it starts from; none: nothing is kept.

    Raises:
        RunError: what is kept is damaged.
    """

    def __init__(self, home: Path, runs: Sequence[str]):
        self._paths = [home / "splits" / f"{run}.json" for run in runs]
        self._own, *others = [splits.read(path) for path in self._paths] or [None]
        self._kept = False
        self.known = together([record for record in (self._own, *others) if record is not None])

    def keep(self, record: Record | None) -> None:
        """Write down, once, in which splits the rows are that are now trained on, and tell this machine's operator what
        has changed."""
        if record is None or not self._paths or self._kept:
            return
        self._kept = True
        if self._own is not None:
            if changed := record.since(self._own):
                print(f"the data have changed: {changed}", flush=True)
            record = record.after(self._own, 0)
        path = self._paths[0]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, json.dumps(checksum.added(record.as_json()), ensure_ascii=False).encode(), private=True)
