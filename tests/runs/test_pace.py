"""Where a run is and how long it will take: words, estimates on a clock of our own, and lines that come in time."""

import contextlib
import io
import itertools
import re
import sys
import threading
import time
import types

import pytest
from rich.console import Console

from llm_fed.basics import signs
from llm_fed.basics.errors import RunError
from llm_fed.commands.api import open_run
from llm_fed.engine import fit
from llm_fed.experiment import finish, run
from llm_fed.runs.tracking import Pace, Reporter, duration
from llm_fed.settings.configfile import from_dict

STAMPED = re.compile(r"\d\d:\d\d:\d\d ")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def reporter_of(clock: Clock) -> Reporter:
    """Of a run of ten rounds, on a clock of our own."""
    reporter = Reporter(Console(quiet=True), clock=clock)
    reporter.pace = Pace(10)
    return reporter


def train(reporter: Reporter, clock: Clock, first: int, number: int, seconds: float) -> None:
    """So many rounds of so many seconds each."""
    for round in range(first, first + number):
        reporter.round(round)
        clock.now += seconds
        reporter.record({"kind": "round", "round": round, "loss": 1.25, "bytes_up": 0, "bytes_down": 0})
        reporter.round_ended()


@pytest.mark.parametrize("first", [1, 8])
def test_the_estimate_is_that_of_this_sessions_rounds(first):
    """Of 60 s each; until the first has ended nothing is known, as where a run goes on after seven others."""
    clock = Clock()
    reporter = reporter_of(clock)
    pace = reporter.pace
    assert pace.left(clock.now) == ""
    train(reporter, clock, first, 2, 60.0)
    assert pace.left(clock.now) == f"about {duration(60 * (9 - first))} left"
    clock.now += 30
    assert pace.left(clock.now) == f"about {duration(60 * (9 - first) - 30)} left"
    train(reporter, clock, first + 2, 9 - first, 60.0)
    assert pace.left(clock.now) == ""


def slowed(monkeypatch, seconds: float, fail_at: int | None = None) -> None:
    """Make each fused step take so long, and one fail in the place of Ctrl-C."""
    real, steps = fit.FusedFit.step, itertools.count()

    def step(self, number, active, losses):
        if next(steps) == fail_at:
            raise KeyboardInterrupt
        time.sleep(seconds)
        real(self, number, active, losses)

    monkeypatch.setattr(fit.FusedFit, "step", step)
    monkeypatch.setattr(finish, "write_report", lambda folder: None)


class Log(io.StringIO):
    """A log file that knows what was written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_a_slow_run_is_never_silent_for_long(small, tmp_path, monkeypatch):
    """Steps of 0.1 s, of which a round has five, under an interval of 0.05 s, in the place of the 30 s of a real
    run."""
    slowed(monkeypatch, 0.1)
    log = Log()
    tree = small.tree(rounds=2, local={"steps": 5}, eval={"every": 0})
    reporter = Reporter(Console(file=log, soft_wrap=True), interval=0.05)
    run.train(from_dict(tree), tmp_path / "run", reporter=reporter)
    lines = log.getvalue().splitlines()
    beats = [line for line in lines if "round 2 of 2, step" in line]
    assert len(beats) > 2 and all(STAMPED.match(line) for line in beats)
    shape = r"\d\d:\d\d:\d\d round 2 of 2, step [1-4] of 5, loss \d\.\d{3}, about \d s left.*"
    assert any(re.fullmatch(shape, beat) for beat in beats)  # after the last step nothing is left
    assert any(STAMPED.match(line) and "round 1/2: loss" in line and "left" in line for line in lines)
    assert all(text.endswith("\n") for text in log.writes)  # no half lines
    metrics = (tmp_path / "run/metrics.jsonl").read_text()
    assert "left" not in metrics and "second" not in metrics


@pytest.mark.parametrize("ending", ["normal", "ctrl-c", "error"])
def test_nothing_is_said_once_a_run_has_ended(small, tmp_path, monkeypatch, ending):
    slowed(monkeypatch, 0.1, fail_at=2 if ending == "ctrl-c" else None)
    if ending == "error":
        monkeypatch.setattr(run, "federate", lambda *_, **__: (_ for _ in ()).throw(RunError("told to fail")))
    log = Log()
    reporter = Reporter(Console(file=log, soft_wrap=True), interval=0.05)
    tree = small.tree(rounds=1, local={"steps": 3}, eval={"every": 0})
    with contextlib.suppress(KeyboardInterrupt, RunError):
        run.train(from_dict(tree), tmp_path / "run", reporter=reporter)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    written = len(log.writes)
    time.sleep(0.2)
    assert len(log.writes) == written
    assert signs.listener.get() is signs.NOBODY


def test_a_bar_that_moves_within_a_round(small, tmp_path, monkeypatch):
    slowed(monkeypatch, 0.12)
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=150)
    (reporter := Reporter(console)).begin("test")  # as a merge does, which has no bar
    reporter.answered(7)
    time.sleep(0.3)
    reporter.end("test")
    tree = small.tree(rounds=2, local={"steps": 4}, eval={"every": 0})
    run.train(from_dict(tree), tmp_path / "run", reporter=reporter)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.getvalue())
    assert "testing, 7 answers" in shown
    assert re.search(r"━ 0:00:\d\d round 2 of 2, step [123] of 4, loss \d.\d+, about \d s left", shown)
    assert re.search(r"━ 0:00:\d\d 2 rounds, loss \d.\d+\s*$", shown)
    assert not STAMPED.search(shown)


@pytest.mark.parametrize("done", [1, 9])
def test_an_estimate_that_is_overdue_grows_and_says_so(done):
    """Rounds of 10 s, and then one in which nothing happens: whether many or few are left, what is said never falls
    behind the time that has passed since it was to end."""
    clock = Clock()
    reporter = reporter_of(clock)
    pace = reporter.pace
    train(reporter, clock, 1, done, 10.0)
    expected = 10.0 * (10 - done)
    assert pace.left(clock.now) == f"about {duration(expected)} left"
    reporter.round(done + 1)
    said = []
    for _ in range(4):
        clock.now += 10 * expected
        said.append(pace.left(clock.now))
    assert len({*said}) == 4 and all("later than expected" in words for words in said), said


# In a notebook progress is lines, and a result shows itself as a table


def test_only_a_kernel_is_a_notebook_and_no_bar_moves_there(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what a kernel writes to may call itself a terminal
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert Reporter().console.is_terminal
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert not Reporter().console.is_terminal


def test_a_result_shows_itself(finished):
    """A table with base and rule; `repr` is one short line."""
    result = open_run(finished)
    html = result._repr_html_()
    for part in (">base<", ">rule<", ">fedmerge<", ">ada<", "worst half"):
        assert part in html
    assert "<script" not in html and "<style" not in html
    assert repr(result).startswith("Result(fedmerge, rouge1 ") and len(repr(result)) < 100 + len(str(finished))
