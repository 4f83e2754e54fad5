"""Locks of other packages: a wait for one is named, and one that a disk does not have is no riddle."""

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path

import filelock
import pytest
import small_run
from rich.console import Console

from llm_fed import rows
from llm_fed.basics import waits
from llm_fed.basics.errors import UserError
from llm_fed.experiment import run
from llm_fed.models.loading import explain
from llm_fed.runs import lock
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict


@pytest.fixture
def named(monkeypatch):
    """Waits are named soon, in this test alone."""
    logger = logging.getLogger("filelock")
    level, filters = logger.level, list(logger.filters)
    monkeypatch.setattr(waits, "_SOON", 0.05)
    logger.filters.clear()
    logger.setLevel(logging.NOTSET)  # as before any command of this process
    waits.name_them()
    yield
    logger.filters[:] = filters
    logger.setLevel(level)


def test_a_wait_is_named_once(tmp_path, named, capsys, caplog):
    path = tmp_path / "weights.lock"
    with open(path, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.5, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()
        with filelock.FileLock(path):
            pass
    waits.name_them()  # again, which changes nothing
    with filelock.FileLock(path), filelock.FileLock(tmp_path / "other.lock"):
        pass
    assert capsys.readouterr().err == (
        f"llm-fed: waiting for the lock {path}, which another process holds (or its disk has no locks; HF_HOME names "
        "another folder for such files)\n"
    )
    assert caplog.records == []  # what was not passed on before is not now


def test_a_wait_that_is_tried_again_counts_as_one(tmp_path, named, capsys):
    """As huggingface_hub waits: ten seconds, and again."""
    with open(tmp_path / "a.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for _ in range(5):
            with pytest.raises(filelock.Timeout):
                filelock.FileLock(tmp_path / "a.lock").acquire(timeout=0.04, poll_interval=0.01)
    assert capsys.readouterr().err.count("waiting for the lock") == 1


def without_locks(monkeypatch, code: int = errno.ENOLCK) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_cache_on_a_disk_without_locks(tmp_path, named, monkeypatch):
    without_locks(monkeypatch)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.csv").write_text("a,b\n1,2\n")
    try:
        rows.folder_data(tmp_path / "own")
    except UserError as error:
        assert str(tmp_path / "cache") in str(error) and "has no locks" in str(error) and "HF_HOME" in str(error)
    else:  # filelock before 3.30 waits for ever, which is named
        pytest.fail("it was read")


@pytest.mark.parametrize("kind", [OSError, NotImplementedError])
def test_a_base_whose_cache_has_no_locks(kind):
    text = "FileSystem does not appear to support flock; use SoftFileLock instead"
    inner = OSError(errno.ENOLCK, "No locks available") if kind is OSError else NotImplementedError(text)
    error = RuntimeError("cannot be fetched")
    error.__cause__ = inner
    said = explain("Qwen/Qwen3-0.6B", error, "a causal LM")
    assert said.startswith("base.name='Qwen/Qwen3-0.6B' cannot be loaded: the disk of") and "HF_HOME" in said
    assert waits.no_locks(ValueError("another")) == ""


def test_a_run_takes_no_lock_of_another_package(tmp_path, monkeypatch):
    """Neither for data, base and scores, nor for the report; its own works on a disk without locks."""

    acquire = filelock.BaseFileLock.acquire

    def taken(self, *arguments, **settings):
        if Path(self.lock_file).name.startswith(lock.NAME):
            return acquire(self, *arguments, **settings)
        raise AssertionError(f"{self.lock_file} was taken")

    monkeypatch.setattr(filelock.BaseFileLock, "acquire", taken)
    without_locks(monkeypatch)
    small = small_run.make(tmp_path)
    for metric in ("rouge1", "exact_match", "squad_f1"):
        config = from_dict(small.tree(rounds=1, eval={"metric": metric, "max_new_tokens": 3}))
        run.train(config, tmp_path / metric, reporter=Reporter(Console(quiet=True)))
        assert (tmp_path / metric / "summary.json").exists()
        assert [path.name for path in Path(tmp_path / metric).glob(".lock*")] == [".lock"]
