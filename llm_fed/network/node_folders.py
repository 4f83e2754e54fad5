"""Folders at a node, whose names come from the server, which is another party."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from llm_fed.basics.errors import UserError
from llm_fed.network.bundle import RUN_NAME


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
