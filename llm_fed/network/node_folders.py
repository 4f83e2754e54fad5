"""What a node keeps in its folders, whose names come from the server, which is another party."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llm_fed.basics import checksum
from llm_fed.basics.errors import UserError
from llm_fed.basics.files import write_file
from llm_fed.experiment import splits
from llm_fed.network.link import RUN_NAME
from llm_fed.tasks.record import Record, together


def personal_folder(home: Path, name: str, token: str) -> Path:
    """The folder for the personal models of a run: of its name, or where that is another run's, with the beginning of
    its token. UserError: a name that cannot be one, or both folders are another run's."""
    name, token = plain(name), plain(token)
    for folder in (home / "adapters" / name, home / "adapters" / f"{name}-{token[:8]}"):
        before = folder.exists() and any(folder.iterdir())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = folder / ".run"
        if not before:
            with suppress(FileExistsError), open(mark, "x", encoding="utf-8") as file:
                file.write(token)
        if not mark.is_symlink() and mark.is_file() and mark.read_text(encoding="utf-8").strip() == token:
            return folder
        print(f"{folder} holds personal models of another run, which stay", flush=True)
    raise UserError(f"the folders {name} and {name}-{token[:8]} of personal models are another run's; move them away")


def plain(name: str) -> str:
    """The name, which can be that of a folder here; UserError where it cannot."""
    if not RUN_NAME.fullmatch(name):
        raise UserError(f"the server's name {name!r} cannot name a folder here")
    return name


class RowsAtNode:
    """What this machine knows of its rows in a run, so that it tests on none that it trained on. RunError: what is kept
    is damaged. `home`: the folder of its memories. `runs`: its token, and those of the runs that it starts from."""

    def __init__(self, home: Path, runs: Sequence[str]):
        self._paths = [home / "splits" / f"{run}.json" for run in runs]
        self._own, *others = [splits.read(path) for path in self._paths] or [None]
        self._kept = False
        self.known = together([record for record in (self._own, *others) if record is not None])

    def keep(self, record: Record | None) -> None:
        """Write down, once, in which splits the rows are, and tell this machine's operator what has changed."""
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
