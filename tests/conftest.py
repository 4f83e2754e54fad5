"""Fixtures that several test files share.

What takes seconds to import is imported where it is used: the process that hands tests to the workers reads this file
before it starts them, and needs none of it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from small_run import Small


def pytest_configure() -> None:
    """No test fails because the machine is busy, and each tries the same examples in every run."""
    import hypothesis

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # as the command line has it
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The modules that are imported live as long as the process, so the garbage collector need not look at their
    million objects, neither while they come nor again with each thing that a test leaves."""
    gc.disable()
    collected = yield
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # of 700 a tenth of the time of a small run
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Processes of tests are forked from one that is as this one is now."""
    if processes := sys.modules.get("small_process"):
        processes.begin()


@pytest.fixture(scope="session", autouse=True)
def quick_runs() -> Iterator[None]:
    import without

    with pytest.MonkeyPatch.context() as patch:
        without.disks(patch)
        without.loading(patch)
        without.measures(patch)
        without.packages(patch)
        without.parsers(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_reports() -> Iterator[None]:
    """A module whose tests look at pictures of reports, or whose runs have odd numbers, has a fixture of this name of
    its own."""
    import without

    with pytest.MonkeyPatch.context() as patch:
        without.pictures(patch)
        yield


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Small:
    """A tiny base and a small federation as files, written once."""
    import small_run

    return small_run.make(tmp_path_factory.mktemp("small"))


@dataclass(frozen=True)
class Said:
    """What a command left behind: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    def assert_refused(self, *parts: str, code: int = 2) -> None:
        """The exit code, and a message of at most two lines with all the parts; nothing on standard output. A failure
        (code 1) may come after what a run says of its plan."""
        assert (self.code, self.out) == (code, ""), self
        lines = self.err.splitlines()
        if code == 1:
            lines = lines[next(n for n, line in enumerate(lines) if line.startswith("llm-fed: ")) :]
        assert 1 <= len(lines) <= 2 and lines[0].startswith("llm-fed: ") and len(self.err) < 700, self.err
        for part in parts:
            assert part in self.err


@pytest.fixture
def llm_fed(capfd) -> Callable[..., Said]:
    """The command line in this process: `llm_fed("run", config, "--fresh")`."""
    from llm_fed import cli

    def call(*words: object) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        return Said(int(ended.value.code or 0), *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def finished(small, tmp_path_factory) -> Path:
    """The folder of a finished run of fedmerge; it must not be changed."""
    from llm_fed.experiment import run
    from llm_fed.settings import configfile

    folder = tmp_path_factory.mktemp("finished")
    method = {"name": "fedmerge", "num_models": 2}
    config = small.as_usual().config(folder / "small.yaml", method=method, local={"steps": 8})
    run.train(configfile.load(config), folder / "run")
    return folder / "run"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder in which one is: modules are found there, and forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    known, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def quick(monkeypatch) -> None:
    """A server that looks for its clients' answers all the time."""
    from llm_fed.network import clients, roster

    for module in (clients, roster):
        monkeypatch.setattr(module, "_PAUSE", 0.01)
