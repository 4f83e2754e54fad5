"""Files that are written whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from llm_fed.errors import RunError, UserError

BATCH = 256  # folders that are brought to the disk together
_FEW = 16  # files; more are not synced one by one
_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)  # Linux has it


def write_file(path: Path, data: bytes, *, sync: bool = True, private: bool = False) -> None:
    """Write `data` so that `path` holds either all of it or what it held before, whatever happens meanwhile.

    Args:
        private: only its owner may read it (0600).
        sync: bring it safely to the disk, with its name; else the caller does so for many (`sync_files`).
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb", opener=_private if private else None) as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder safely to the disk, or the content of a file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """Bring files and their names safely to the disk: few by `fsync` of each, many by one `syncfs` of their file
    system, where there is that."""
    paths = sorted(paths)
    if len(paths) <= _FEW or _syncfs is None:
        for path in dict.fromkeys([*paths, *(path.parent for path in paths)]):
            sync_folder(path)
        return
    handle = os.open(paths[0], os.O_RDONLY)
    try:
        if _syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(handle)


def write_folder(folder: Path, files: Mapping[str, bytes], what: str) -> None:
    """`write_folders` for one."""
    write_folders([(folder, files)], what)


def write_folders(folders: Iterable[tuple[Path, Mapping[str, bytes]]], what: str) -> None:
    """Write folders that appear complete or not at all, and that only their owner may read (0700, their files 0600).

    One that exists is replaced when the new one is complete, and only if it holds nothing but files of these names.
    Of each BATCH of them, all that they hold is brought to the disk at once, before the first appears.

    Args:
        folders: on one file system; each with its contents by path in the folder.
        what: what such a folder holds, for messages.

    Raises:
        UserError: a folder holds other files.
        RunError: the disk is full, or a folder cannot be written.
    """
    remaining = iter(folders)
    while _write_batch(islice(remaining, BATCH), what):
        pass


def _write_batch(folders: Iterable[tuple[Path, Mapping[str, bytes]]], what: str) -> int:
    """How many folders there were."""
    begun: list[Path] = []
    written: list[Path] = []
    try:
        for folder, files in folders:
            _check_replaceable(folder, files, what)
            begun.append(folder)
            partial = _beside(folder, "partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir(mode=0o700)
            for name, data in files.items():
                path = partial / name
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_file(path, data, sync=False, private=True)
                written.append(path)
        sync_files(written)
        for folder in begun:
            replaced = _beside(folder, "replaced")
            if folder.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.replace(folder, replaced)
            os.replace(_beside(folder, "partial"), folder)
            shutil.rmtree(replaced, ignore_errors=True)
        for parent in {folder.parent for folder in begun}:
            sync_folder(parent)
    except OSError as error:
        raise RunError(f"cannot write {what} to {folder}: {error.strerror or error}") from error
    finally:
        for folder in begun:
            shutil.rmtree(_beside(folder, "partial"), ignore_errors=True)
    return len(begun)


def _check_replaceable(folder: Path, files: Mapping[str, bytes], what: str) -> None:
    expected = {Path(name).parts[0] for name in files}
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= expected):
        raise UserError(f"{folder} exists and does not hold {what}, so it is not replaced; give another folder")


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}.{suffix}")
