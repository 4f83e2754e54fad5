"""Folders that are written in batches appear complete or not at all, and are brought to the disk once per batch."""

from __future__ import annotations

import os
import shutil

import pytest

from llm_fed import files
from llm_fed.errors import UserError

COUNT = 13  # in batches of 6, 6 and 1
FILES = {"a.json": b"{}", "README.md": b"a card", "expert/a.json": b"[]"}


class Killed(BaseException):
    """Nothing in the project catches this."""


def folders(path, last=b"a card"):
    return ((path / f"client{number}", {**FILES, "README.md": last}) for number in range(COUNT))


def written(path):
    found = {folder.name for folder in path.iterdir()}
    for name in found:
        assert {str(p.relative_to(path / name)) for p in (path / name).rglob("*.*")} == set(FILES)
    return found


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(files, "BATCH", 6)


@pytest.mark.skipif(files._syncfs is None, reason="without syncfs each file is synced by itself")
def test_a_batch_is_synced_once(tmp_path, monkeypatch, small_batches):
    """The last one has three files in two folders, which are few; the names of all are synced where they appear."""
    calls = {"file system": 0, "file": 0}

    def whole(handle):
        assert len(list(tmp_path.glob("client*"))) == 6 * calls["file system"]  # nothing appears before
        calls["file system"] += 1
        return 0

    def one(handle):
        calls["file"] += 1

    monkeypatch.setattr(files, "_syncfs", whole)
    monkeypatch.setattr(os, "fsync", one)
    files.write_folders(folders(tmp_path), "an adapter")
    assert len(written(tmp_path)) == COUNT
    assert calls == {"file system": 2, "file": 3 + 3 + 2}


@pytest.mark.skipif(files._syncfs is None, reason="there is no syncfs")
def test_a_failed_sync_is_an_error(tmp_path, monkeypatch, small_batches):
    monkeypatch.setattr(files, "_syncfs", lambda handle: -1)
    with pytest.raises(files.RunError, match=r"cannot write an adapter to .*client5"):
        files.write_folders(folders(tmp_path), "an adapter")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["sync_files", "os.replace"])
def test_a_kill_leaves_no_folder_that_looks_complete(tmp_path, monkeypatch, small_batches, where):
    """Between the writing of a batch and its appearance, and between the appearance of two folders: what is named
    without a dot is whole, and the same command then writes everything."""
    files.write_folders(folders(tmp_path, b"old"), "an adapter")
    real, seen = os.replace, []

    def kill(*given):
        raise Killed

    def replace(old, new):
        if str(new).endswith("client7"):
            raise Killed
        seen.append(new)
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *given, **named: None)  # a process that is killed cleans nothing up
        patch.setattr(*((files, where, kill) if where == "sync_files" else (os, "replace", replace)))
        with pytest.raises(Killed):
            files.write_folders(folders(tmp_path, b"new"), "an adapter")
    for path in tmp_path.iterdir():
        if not path.name.startswith("."):
            assert {str(p.relative_to(path)) for p in path.rglob("*.*")} == set(FILES)
            assert (path / "README.md").read_bytes() in (b"old", b"new")
    files.write_folders(folders(tmp_path, b"new"), "an adapter")
    assert {(path / "README.md").read_bytes() for path in tmp_path.iterdir()} == {b"new"}
    assert len(written(tmp_path)) == COUNT


def test_the_first_folder_of_something_else_ends_it_all(tmp_path, small_batches):
    (tmp_path / "client7").mkdir()
    (tmp_path / "client7" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="client7 exists and does not hold an adapter"):
        files.write_folders(folders(tmp_path), "an adapter")
    assert {path.name for path in tmp_path.iterdir()} == {f"client{number}" for number in (0, 1, 2, 3, 4, 5, 7)}
