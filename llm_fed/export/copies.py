"""Copies of a run's adapters for others: which may be copied, and what of them stays here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from llm_fed.basics import checksum
from llm_fed.basics.errors import UserError, one_line
from llm_fed.export.peft_settings import CONFIG, public_config
from llm_fed.export.tensors import read_json
from llm_fed.models.origin import Origin
from llm_fed.models.prompt import FILE, ORIGIN
from llm_fed.runs.reading import exported


def handed_out(folder: Path, clients: Sequence[str] = ()) -> dict[str, Path]:
    """As `runs.reading.exported`, for copies that others will have. UserError: as `exported`, or an adapter has a link,
    which might lead to any file of this machine."""
    folders = exported(folder, clients)
    for path in folders.values():
        if link := next((inner for inner in (path, *path.rglob("*")) if inner.is_symlink()), None):
            raise UserError(
                f"{link} is a symbolic link, whose target would be copied with the adapter; replace the link by the "
                "file itself, or delete it"
            )
    return folders


def public_content(path: Path) -> bytes | None:
    """A file for others, without paths of this machine; None of one that has none. UserError: it is damaged."""
    if path.name == CONFIG:
        return public_config(path)
    if path.name != FILE:
        return None
    try:
        values = checksum.checked(read_json(path))
        if ORIGIN in values:
            values[ORIGIN] = Origin.from_json(values[ORIGIN]).public().as_json()
        return json.dumps(checksum.added(values), indent=2, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {one_line(str(error))}; export the adapter again") from error
