"""Locks of other packages, which a disk may not have."""

import errno
import fcntl
import os
from pathlib import Path

import filelock
import pytest
import small_run
from rich.console import Console

from llm_fed import rows
from llm_fed.basics.errors import UserError, no_locks
from llm_fed.experiment import run
from llm_fed.models.loading import explain
from llm_fed.runs import lock
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict


def without_locks(monkeypatch, code: int = errno.ENOLCK) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_cache_on_a_disk_without_locks(tmp_path, monkeypatch):
    without_locks(monkeypatch)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no locks; set HF_HOME to a folder on another disk"):
        rows.folder_data(tmp_path / "own")


def test_a_base_whose_cache_has_no_locks():
    error = RuntimeError("cannot be fetched")
    error.__cause__ = OSError(errno.ENOLCK, "No locks available", "a.lock")
    said = explain("Qwen/Qwen3-0.6B", error, "a causal LM")
    assert said.startswith("base.name='Qwen/Qwen3-0.6B' cannot be loaded: the disk of the cache (a.lock) has no locks")
    assert no_locks(ValueError("another")) == ""


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
