"""Files that are written whole or not at all, whatever happens meanwhile, and never through a link.

A folder may come from somebody else, with links in the indices where llm_fed writes. A file that is written at once
takes the place of such a link; one that grows is refused; and in no folder that is a link anything is made or deleted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from llm_fed.basics.errors import RunError, UserError

BATCH = 256  # folders that are brought to the disk together
_FEW = 16  # files; more are not synced one by one
_syncfs = ctypes.CDLL(None, use_errno=True).syncfs if sys.platform == "linux" else None


def write_file(path: Path, data: bytes, *, sync: bool = True, private: bool = False) -> None:
    """Write `data` so that `path` holds either all of it or what it held before, whatever happens meanwhile; only its
    owner may read a `private` one (0600). With `sync` it is brought safely to the disk, with its name; else the caller
    does so for many (`sync_files`)."""
    mode = 0o600 if private else 0o666
    # Nobody can know the name, so nothing lies there; O_EXCL makes sure of it.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb", opener=lambda name, flags: _unlinked(name, flags, mode)) as file:
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


def write_result(path: Path, data: bytes) -> None:
    """Write what a command was asked for; its folder is made. RunError: it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def read_file(path: Path, start: int = 0, end: int | None = None) -> bytes:
    """The bytes of a file, from `start` to `end`; OSError for a folder, and for what has no end, as a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        file.seek(start)
        return file.read() if end is None else file.read(max(0, end - start))


def append_file(path: Path, data: bytes) -> None:
    """Write at the end of a file, which is made if it is not there; UserError where it is a link, or no file."""
    with os.fdopen(open_unlinked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(data)


def cut_file(path: Path, size: int) -> None:
    """Cut a file to `size` bytes; UserError where it is a link, or no file."""
    with os.fdopen(open_unlinked(path, os.O_WRONLY), "ab") as file:
        file.truncate(size)


def open_unlinked(path: Path, flags: int) -> int:
    """A file under no second name, such as one outside the folder: what has one is copied first. UserError where it is
    a link, or no file."""
    if path.exists() and not (path.is_file() or path.is_symlink()):
        raise UserError(f"{path} is no file, so nothing is written to it; delete it, or give another folder")
    try:
        handle = _unlinked(str(path), flags)
    except OSError:
        check_unlinked(path)
        raise
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        write_file(path, path.read_bytes())
        handle = _unlinked(str(path), flags)
    return handle


def check_unlinked(path: Path) -> None:
    """UserError where a path that is written to, or below, is a link."""
    if path.is_symlink():
        raise UserError(
            f"{path} is a symbolic link, and nothing is written through one, as it may lead to any file; put there "
            "what it leads to, delete it, or give another folder"
        )


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder within one of llm_fed's own, if it is not there; UserError where a link is in its place."""
    check_unlinked(folder)
    folder.mkdir(mode=mode, parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Delete a file, a folder with all that it holds, or a link but not what that leads to; if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_folder(whole: Path, folder: Path) -> None:
    """Give a complete folder beside `folder`, on the disk, its name."""
    replaced = _beside(folder, "replaced")
    if os.path.lexists(folder):
        remove(replaced)
        os.replace(folder, replaced)
    os.replace(whole, folder)
    remove(replaced)  # also what a kill between the two has left


def _unlinked(path: str, flags: int, mode: int = 0o666) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder safely to the disk, or the content of a file."""
    handle = os.open(folder, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """Bring files and their names safely to the disk: few by `fsync` of each, many by one `syncfs`."""
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


def write_folders(folders: Iterable[tuple[Path, Mapping[str, bytes]]], what: str) -> None:
    """Write folders, of one file system and with contents by path, that appear complete or not at all, and that only
    their owner may read (0700, their files 0600).

    One that exists is replaced when the new one is complete, and only if it holds nothing but files of these names,
    else UserError. Of each BATCH of them, all that they hold is brought to the disk at once, before the first appears.
    RunError where the disk is full, or a folder cannot be written. `what` they hold is for messages.
    """
    remaining = iter(folders)
    while _write_batch(islice(remaining, BATCH), what):
        pass


def _write_batch(folders: Iterable[tuple[Path, Mapping[str, bytes]]], what: str) -> int:
    """How many folders there were; the contents of one are in memory at a time."""
    begun: list[Path] = []
    written: list[Path] = []
    try:
        for folder, files in folders:
            expected = {Path(name).parts[0] for name in files}
            if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= expected):
                raise UserError(f"{folder} exists and does not hold {what}, so it is not replaced; give another folder")
            begun.append(folder)
            partial = _beside(folder, "partial")
            remove(partial)
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir(mode=0o700)
            for name, data in files.items():
                path = partial / name
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_file(path, data, sync=False, private=True)
                written.append(path)
        sync_files(written)
        for folder in begun:
            put_folder(_beside(folder, "partial"), folder)
        for parent in {folder.parent for folder in begun}:
            sync_folder(parent)
    except OSError as error:
        raise RunError(f"cannot write {what} to {folder}: {error.strerror or error}") from error
    finally:
        for folder in begun:
            shutil.rmtree(_beside(folder, "partial"), ignore_errors=True)
    return len(begun)


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}.{suffix}")
