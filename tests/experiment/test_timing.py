"""How long a run will take, said before its first step: the words, what is timed, and that it changes nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
import tiny_images
import torch
from rich.console import Console

from llm_fed.bench import build
from llm_fed.engine import fit, inference
from llm_fed.experiment import finish, run, timing
from llm_fed.models import speed
from llm_fed.runs.forecast import Forecast, Span, duration
from llm_fed.runs.pace import Ahead, Pace
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict

STEP, LOSS, READ, TOKEN = (
    0.02,
    0.004,
    0.01,
    0.002,
)  # seconds of a client step, and of an example's loss; of a prompt; of a token
FORECAST = timing.with_forecast  # which other tests do without, see without.py


@pytest.fixture(autouse=True)
def no_reports(monkeypatch):
    monkeypatch.setattr(finish, "write_report", lambda folder: None)
    monkeypatch.setattr(timing, "with_forecast", FORECAST)


@pytest.fixture
def clock(monkeypatch) -> None:
    """Time passes only in what is timed, and as fast as is known: for all prompts of a batch side by side."""
    now = [0.0]
    step, losses = fit.FusedFit.step, inference.mean_losses

    def slower(self: fit.FusedFit, number: int, seen: Any, found: Any) -> None:
        now[0] += STEP * len(seen)
        step(self, number, seen, found)

    def scored(model: Any, bank: Any, asked: Any, **options: Any) -> Any:
        now[0] += LOSS * sum(len(examples) for _, examples in asked)
        return losses(model, bank, asked, **options)

    monkeypatch.setattr(timing, "clock", lambda: now[0])
    monkeypatch.setattr(fit.FusedFit, "step", slower)
    monkeypatch.setattr(inference, "mean_losses", scored)
    monkeypatch.setattr(timing, "seconds_of_tokens", lambda base, bank, asked, tokens: (READ * len(asked), TOKEN))


def prepared(settings: dict[str, Any]) -> build.Experiment:
    return build.prepare(from_dict(settings), Reporter(Console(quiet=True)))


def test_spans_in_words():
    assert (
        str(Span(60, 70)) == "60 s" and str(Span(600, 1200)) == "10 to 20 min" and str(Span(50, 200)) == "50 s to 3 min"
    )
    assert str(Span(3, 3)) == "3 s" and duration(Span(2, 4).middle) == "3 s"
    forecast = Forecast(Span(10, 10), Span(1, 3), Span(4, 4), Span(2, 2))
    said = "about 10 to 13 min: training 8 min, scoring 2 to 5 min, export and report 2 s"
    assert forecast.in_words(rounds=50, answers=100, base_answers=0) == said
    assert "scoring" not in forecast.in_words(rounds=50, answers=0, base_answers=0)


def test_a_crowded_machine_is_named_where_several_threads_wait_for_each_other(small, clock, monkeypatch):
    built = prepared(small.tree(rounds=50, local={"steps": 10}))
    cases = {(2, 9.0): True, (1, 9.0): False, (2, 3.9): False}  # threads and processes that want to run, on two cores
    monkeypatch.setattr(speed.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for (threads, load), named in cases.items():
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(speed.psutil, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        words = timing.with_forecast(built, timing.ahead(built)).in_words()
        assert words.endswith("9 processes want the 2 cores, and threads wait for each other: OMP_NUM_THREADS=1 may be "
                              "much faster") == named, words  # fmt: skip


@pytest.mark.parametrize(("method", "fits"), [("fedit", 1), ("ditto", 2)])
def test_the_forecast_is_what_the_work_takes(small, clock, method, fits):
    """Three clients take four steps in each fit, of which ditto has two. An answer is two words and the end, or at most
    as long as `eval.max_new_tokens`, four. Of 318 answers six are timed, and nine are made side by side, so that a
    token of each takes a ninth or a sixth of what was seen."""
    built = prepared(
        small.tree(rounds=50, method={"name": method}, local={"steps": 4}, eval={"max_new_tokens": 4, "batch_size": 9})
    )
    found = timing.with_forecast(built, timing.ahead(built)).forecast
    assert found is not None
    assert found.round.low == found.round.high == pytest.approx(3 * 4 * STEP * fits)
    assert found.answer.low == pytest.approx(READ + LOSS + TOKEN * 3 / 9)
    assert found.base_answer.high == found.answer.high == pytest.approx(READ + LOSS + TOKEN * 4 / 6)


def test_a_method_that_sets_its_own_steps(tmp_path, small, clock):
    """What it does whatever `local.steps` says is timed as a whole."""
    built = prepared(small.tree(rounds=50, method={"name": "pfedme"}, local={"steps": 4}))
    found = timing.with_forecast(built, timing.ahead(built)).forecast
    site = built.clients["ada"]
    (update,) = built.runtime.run({"": built.method.client_update(site, built.method.init(built.server))}).values()
    assert found is not None and not isinstance(update, Exception)
    assert found.round.low == pytest.approx(3 * STEP * len(site.losses), rel=0.3)


def test_it_is_said_before_the_first_step_and_counts_down(small, tmp_path, clock, monkeypatch):
    monkeypatch.setattr(timing, "SHORT", 1.0)
    said = io.StringIO()
    config = from_dict(small.tree(rounds=8))
    run.train(config, tmp_path / "run", reporter=Reporter(Console(file=said, soft_wrap=True)))
    lines = said.getvalue().splitlines()
    places = [n for n, line in enumerate(lines) if line.startswith("time       about ")]
    first = next(n for n, line in enumerate(lines) if "round 1/" in line)
    assert len(places) == 1 and places[0] < first and "scoring" in lines[places[0]]
    assert not [line for line in lines if "scores not counted" in line]
    expected = lines[places[0]].split("about ")[1].partition(":")[0]
    assert lines[-1].endswith(f"(expected: {expected})") and " took " in lines[-1]


def test_a_short_run_needs_none(small, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "SHORT", 1e6)
    said = io.StringIO()
    run.train(from_dict(small.tree(rounds=1)), tmp_path / "run", reporter=Reporter(Console(file=said)))
    assert "time  " not in said.getvalue()


def test_what_is_timed_changes_nothing(small, tmp_path, clock, monkeypatch):
    """Not the numbers of the run, nor what clients remember, nor what the engine counts."""
    monkeypatch.setattr(timing, "SHORT", 0.0)
    built = prepared(small.tree(rounds=30, method={"name": "scaffold"}, local={"optimizer": "sgd"}))
    before = {id: dict(vars(site)) for id, site in built.clients.items()}
    assert timing.with_forecast(built, timing.ahead(built)).forecast is not None
    assert {id: dict(vars(site)) for id, site in built.clients.items()} == before
    assert built.runtime.take_work().tokens == 0 and built.engine.budget is None
    config = from_dict(small.tree(rounds=3, eval={"max_new_tokens": 1}))
    for name, quiet in (("told", False), ("silent", True)):
        run.train(config, tmp_path / name, reporter=Reporter(Console(file=io.StringIO(), quiet=quiet)))
    assert (tmp_path / "told/metrics.jsonl").read_bytes() == (tmp_path / "silent/metrics.jsonl").read_bytes()


def test_a_step_that_fails_is_the_runs_to_report(small, monkeypatch):
    def fails(self: Any, *_: Any) -> None:
        raise ValueError("no step")

    built = prepared(small.tree(rounds=30))
    monkeypatch.setattr(timing, "SHORT", 0.0)
    monkeypatch.setattr(fit.FusedFit, "step", fails)
    assert timing.with_forecast(built, timing.ahead(built)).in_words() == ""


def test_pictures_too(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "SHORT", 0.0)
    path = tiny_images.npz(tmp_path / "a.npz", train=24, test=12)
    built = prepared(tiny_images.tree(path))
    found = timing.with_forecast(built, timing.ahead(built))
    assert found.forecast is not None and found.forecast.answer.low > 0 and found.base_answers == 0


def test_a_dry_run_says_it(small, clock, llm_fed, tmp_path):
    path = small.config(tmp_path / "c.yaml", rounds=60, local={"steps": 10})
    said = llm_fed("run", path, "--dry-run", "--out", tmp_path / "run")
    assert said.code == 0 and "time       about " in said.out and not (tmp_path / "run").exists()


def test_what_is_ahead(small):
    """Three clients with two validation and three test examples; the base answers the test once, or the samples."""
    for base, expected in (("auto", 9), (True, 15), (False, 9)):
        built = prepared(small.tree(eval={"base": base, "every": 2}))
        plan = timing.ahead(built)
        assert (plan.answers, plan.base_answers) == ({"validation": 6, "test": 9}, expected)
        assert (plan.answers_after(0), plan.answers_after(2), plan.answers_after(3)) == (21, 15, 9)
    assert Ahead(3).in_words() == ""


def test_what_clients_on_other_machines_answer_is_not_known(small):
    """So an estimate says that it leaves their scores out, to the last."""
    clock = [0.0]
    pace = Pace(Ahead(2, elsewhere=True), lambda: clock[0])
    for number in (1, 2):
        pace.round(number)
        clock[0] += 10
        pace.round_ended()
        assert pace.left().endswith("left, scores not counted")
