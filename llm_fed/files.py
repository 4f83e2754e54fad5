"""Files that are written whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from llm_fed.errors import RunError, UserError


def write_file(path: Path, data: bytes, *, sync_name: bool = True, private: bool = False) -> None:
    """Write `data` so that `path` holds either all of it or what it held before, whatever happens meanwhile.

    Args:
        private: only its owner may read it (0600).
        sync_name: bring the file's name safely to the disk, too; else the caller does so for many (`sync_folder`).
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb", opener=_private if private else None) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync_name:
        sync_folder(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder safely to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_folder(folder: Path, files: Mapping[str, bytes], what: str) -> None:
    """Write a folder that appears complete or not at all, and that only its owner may read (0700, its files 0600).

    One that exists is replaced when the new one is complete, and only if it holds nothing but files of these names.

    Args:
        files: contents by path in the folder.
        what: what the folder holds, for messages.

    Raises:
        UserError: the folder holds other files.
        RunError: the disk is full, or the folder cannot be written.
    """
    expected = {Path(name).parts[0] for name in files}
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= expected):
        raise UserError(f"{folder} holds something else than {what} and is not replaced; give another folder")
    partial, replaced = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "replaced"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        for name, data in files.items():
            (partial / name).parent.mkdir(mode=0o700, exist_ok=True)
            write_file(partial / name, data, private=True)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(folder, replaced)
        os.replace(partial, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise RunError(f"cannot write {what} to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
