"""Folders that are written in batches appear complete or not at all, and are brought to the disk once per batch."""

import os
import shutil

import pytest

from llm_fed.basics import files
from llm_fed.basics.errors import UserError

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


@pytest.mark.parametrize("where", ["sync_files", "put_folder"])
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_leaves_no_folder_that_looks_complete(tmp_path, monkeypatch, small_batches, where, exchanges):
    """Between the writing of a batch and its appearance, and between the appearance of two folders: what is named
    without a dot is whole, and the same command then writes everything."""
    if not exchanges:  # as on disks where two names cannot change places at once
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    files.write_folders(folders(tmp_path, b"old"), "an adapter")
    real, seen = files.put_folder, []

    def kill(*given):
        raise Killed

    def replace(old, new):
        if str(new).endswith("client7"):
            raise Killed
        seen.append(new)
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *given, **named: None)  # a process that is killed cleans nothing up
        patch.setattr(*(files, where, kill if where == "sync_files" else replace))
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


def test_a_folder_is_there_at_every_moment_while_it_is_replaced(tmp_path):
    """Where the system can exchange two names; the names of neither are left behind."""
    if files._renameat2 is None:
        pytest.skip("there is no renameat2")
    files.write_folder(tmp_path / "ada", {"a": b"old"}, "an adapter")
    real, seen = files.remove, []

    def look(path):
        seen.append((tmp_path / "ada" / "a").read_bytes())
        real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "remove", look)
        files.write_folder(tmp_path / "ada", {"a": b"new"}, "an adapter")
    assert seen == [b"old", b"new"] and [path.name for path in tmp_path.iterdir()] == ["ada"]


def test_what_grows_has_no_name_elsewhere(tmp_path):
    """Not by a link, which is refused, nor by a second name, which then keeps what it had."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    for write in (lambda path: files.append_file(path, b"more"), lambda path: files.cut_file(path, 0)):
        with pytest.raises(UserError, match="log is a symbolic link"):
            write(tmp_path / "log")
        os.link(tmp_path / "victim", tmp_path / "second")
        write(tmp_path / "second")
        assert (tmp_path / "second").read_bytes() in (b"preciousmore", b"")
        (tmp_path / "second").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((UserError, OSError)):
        files.append_file(tmp_path / "pipe", b"more")
    assert (tmp_path / "victim").read_text() == "precious"
