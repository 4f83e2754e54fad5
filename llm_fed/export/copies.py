"""Which adapters of a run may be copied for others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llm_fed.errors import UserError
from llm_fed.runs.reading import exported


def handed_out(folder: Path, clients: Sequence[str] = ()) -> dict[str, Path]:
    """As `runs.reading.exported`, for copies that others will have.

    Raises:
        UserError: as `exported`, or an adapter has a link, which might lead to any file of this machine.
    """
    found = exported(folder, clients)
    for path in found.values():
        if link := next((inner for inner in (path, *path.rglob("*")) if inner.is_symlink()), None):
            raise UserError(
                f"{link} is a symbolic link, whose target would be copied with the adapter; replace the link by the "
                "file itself, or delete it"
            )
    return found
