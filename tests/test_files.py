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


KILLS = {
    "before any appears": (files, "sync_files", lambda *given: True),
    "before one appears": (files, "put_folder", lambda whole, folder: folder.name == "client7"),
    "between two renames": (os, "replace", lambda old, new: new.name == "client7"),
    "before the old one goes": (files, "remove", lambda path: path.name == ".client7.replaced" and path.exists()),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_kill_leaves_no_folder_that_looks_complete(tmp_path, monkeypatch, small_batches, when):
    """Between the writing of a batch and its appearance, between the appearance of two folders, and while one replaces
    another: what is named without a dot is whole, and the same command then writes everything."""
    files.write_folders(folders(tmp_path, b"old"), "an adapter")
    owner, name, is_now = KILLS[when]
    real = getattr(owner, name)

    def until(*given):
        if is_now(*given):
            raise Killed
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *given, **named: None)  # a process that is killed cleans nothing up
        patch.setattr(owner, name, until)
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
