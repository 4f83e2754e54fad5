"""A run that is continued with more rounds, or with other settings of the search for its best round."""

import json
import shutil
from pathlib import Path
from typing import Any

import equal_runs
import network
import pytest
import toy

from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.experiment import run as experiment
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, Scoring, federate
from llm_fed.federation.schedule import Delayed
from llm_fed.methods.fedbuff import FedBuff
from llm_fed.methods.fedit import FedIT
from llm_fed.methods.fedmerge import FedMerge
from llm_fed.methods.fedsa import FedSA
from llm_fed.network import server
from llm_fed.runs import tracking
from llm_fed.runs.checkpoint import Checkpoints, rounds_in
from llm_fed.runs.folder import Run
from llm_fed.runs.reading import is_finished
from llm_fed.runs.records import read_records, timed_rounds
from llm_fed.scoring.scores import summarize
from llm_fed.settings import configfile
from llm_fed.state.wire import pack

CONSTANT = {"steps": 1, "lr": 0.05, "lr_end": 0.05}
SCORES = {1: 30.0, 2: 90.0, 3: 60.0, 4: 50.0, 5: 70.0, 6: 10.0, 7: 80.0, 8: 20.0}
# Rounds that it has one after another, the method, the configuration's sections, and how late client i answers.
TOYS: dict[str, tuple[list[int], Any, dict[str, Any]]] = {
    "every round is scored": ([4, 8], FedIT(), {"eval": {"every": 1}}),
    "eval.every divides the old rounds": ([4, 8], FedIT(), {"eval": {"every": 2}}),
    "eval.every does not divide them": ([5, 8], FedIT(), {"eval": {"every": 3}}),
    "the round that was the last was the best": ([2, 8], FedIT(), {"eval": {"every": 3}}),
    "again and again": ([1, 2, 5, 7, 8], FedIT(), {"eval": {"every": 3}}),
    "only the last round is scored": ([4, 8], FedIT(), {"eval": {"every": 0}}),
    "tested during training": ([4, 8], FedIT(), {"eval": {"every": 3, "during": "test"}}),
    "the last is selected": ([4, 8], FedIT(), {"eval": {"every": 3, "select": "last"}}),
    "few checkpoints": ([4, 8], FedIT(), {"eval": {"every": 3}, "checkpoint": {"every": 3, "keep": 1}}),
    "state of the server": ([4, 8], FedMerge(num_models=3), {"eval": {"every": 3}}),
    "state of the clients": ([4, 8], FedSA(), {"eval": {"every": 3}}),
    "a late step": ([4, 8], FedBuff(buffer=2), {"eval": {"every": 3}}),
}  # fmt: skip
# Of two rounds `fedlora` trains both together, of four three.
CASES: dict[str, dict[str, Any]] = {
    "fedlora": {"eval": {"every": 3}, "method": {"name": "fedlora", "personal_share": 0.4}},
    "fedsa": {"eval": {"every": 3}, "method": {"name": "fedsa"}, "participation": 0.5, "delay": {"sigma": 1.0}},
}
SHORT, LONG = 2, 4


class Said(tracking.Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(small, folder: Path, rounds: int, **changes: Any) -> list[str]:
    """Trains, or continues, and returns what was said."""
    said = Said()
    settings = {"local": CONSTANT, **changes}
    path = folder.parent / f"{folder.name}.yaml"
    experiment.train(configfile.load(small.config(path, rounds=rounds, **settings)), folder, reporter=said)
    return said.notes


def checkpoint(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The newest one: the state without the settings of the search, and the rows that it refers to."""
    saved = Checkpoints(folder / "checkpoints").latest()
    assert saved is not None
    manifest = json.loads((folder / f"checkpoints/round-{saved.round:04d}/manifest.json").read_text())
    return pack(saved.state), manifest["rows"]


def score_rounds(folder: Path) -> list[tuple[int, str]]:
    """Of the run's own models; the base alone is round 0."""
    lines = [line for line in read_records(folder / "metrics.jsonl") if line["kind"] == "score" and line["round"]]
    return [(line["round"], line["split"]) for line in lines]


def toy_run(folder: Path, rounds: int, method: Any, **settings: Any) -> Any:
    """The progress at the end of a run without a language model. Its scores are those of SCORES."""
    clients, server = toy.clients(4), toy.server()
    server.clients, server.cohort = tuple(clients), 2
    runtime = toy.ToyRuntime({name: float(place) for place, name in enumerate(clients)})
    schedule = Delayed(tuple(clients), 0.5, seed=1, sigma=2.0, drop_out=0.1)

    def evaluate(messages: Any, split: str) -> Any:
        return summarize("accuracy", {"c0": SCORES[read_records(folder / "metrics.jsonl")[-1]["round"]]})

    with Run(folder, toy.config(rounds=rounds, **settings)) as run:
        run.begin()
        federation = Federation(method, LocalClients(clients, schedule, runtime), server, runtime)
        return federate(federation, run, Scoring(clients, evaluate))


@pytest.mark.parametrize("case", TOYS)
def test_extended_rounds_equal_those_of_the_longer_run(tmp_path, case):
    """Bit for bit: metrics.jsonl, the checkpoint, answers on their way, and which round is the best. What the short run
    scored only because it was its end leaves no trace."""
    chain, method, settings = TOYS[case]
    long = toy_run(tmp_path / "long", chain[-1], method, **settings)
    for rounds in chain:
        short = toy_run(tmp_path / "short", rounds, method, **settings)
        assert score_rounds(tmp_path / "short")[-1][0] == rounds
        assert short.in_flight or rounds != 4  # the first run ends before these arrive
    assert (short.best.round, short.best.score) == (long.best.round, long.best.score)
    assert long.best.round in (rounds_in(tmp_path / "short/checkpoints"))
    assert (tmp_path / "short/metrics.jsonl").read_bytes() == (tmp_path / "long/metrics.jsonl").read_bytes()
    assert checkpoint(tmp_path / "short") == checkpoint(tmp_path / "long")


@pytest.mark.parametrize("case", CASES)
def test_an_extended_run_equals_the_longer_one(small, tmp_path, case):
    """Bit for bit: adapters, cards, scores, metrics.jsonl, summary and the last checkpoint."""
    settings = CASES[case]
    train(small, tmp_path / "long", LONG, **settings)
    train(small, tmp_path / "short", SHORT, **settings)
    assert score_rounds(tmp_path / "short")[-2:] == [(SHORT, settings["eval"].get("during", "validation"))] + [
        (json.loads((tmp_path / "short/summary.json").read_text())["round"], "test")
    ]
    said = train(small, tmp_path / "short", LONG, **settings)
    assert f"this run had {SHORT} rounds and continues to {LONG}" in said
    assert not any("lr_end" in note for note in said)
    assert equal_runs.files(tmp_path / "short", "needs/") == equal_runs.files(tmp_path / "long", "needs/")
    assert checkpoint(tmp_path / "short") == checkpoint(tmp_path / "long")


def test_an_unfinished_run_is_extended_or_cut_short(small, tmp_path, monkeypatch):
    """Broken off after round 3 of 6, a run is to have 4, then 7."""
    settings = {"eval": {"every": 2}}
    with monkeypatch.context() as broken:
        broken.setattr(experiment, "federate", _breaks_off(3))
        with pytest.raises(KeyboardInterrupt):
            train(small, tmp_path / "run", 6, **settings)
    said = train(small, tmp_path / "run", 4, **settings)
    assert "this run had 6 rounds, of which 3 are done, and continues to 4" in said
    for rounds in (4, 7):
        train(small, tmp_path / "run", rounds, **settings)
        train(small, tmp_path / str(rounds), rounds, **settings)
        assert equal_runs.files(tmp_path / "run", "needs/") == equal_runs.files(tmp_path / str(rounds), "needs/")


def _breaks_off(after: int) -> Any:
    federate = experiment.federate

    def broken(federation: Federation, *rest: Any, **options: Any) -> Any:
        exchange = federation.clients.exchange

        def until(method: Any, progress: Any, *given: Any) -> Any:
            if progress.round > after:
                raise KeyboardInterrupt
            return exchange(method, progress, *given)

        federation.clients.exchange = until
        return federate(federation, *rest, **options)

    return broken


# What the way from a finished short run to an extended one does to the disk, each of which may be the last thing done.
STEPS = [
    ("os:replace", "reopened.json"),
    ("os:replace", "config.yaml"),
    ("llm_fed.runs.folder:cut_file", "metrics.jsonl"),
    ("llm_fed.runs.folder:Run.log", ""),
    ("os:replace", "round-0003"),
    ("llm_fed.runs.folder:Run.log_timing", ""),
    ("llm_fed.experiment.finish:write_report", ""),
    ("os:replace", "summary.json"),
]


@pytest.fixture(scope="module")
def pair(small, tmp_path_factory) -> Path:
    """A finished short run and the longer one, with a falling score at the end of neither."""
    folder = tmp_path_factory.mktemp("pair")
    train(small, folder / "short", 2, eval={"every": 3})
    train(small, folder / "long", 4, eval={"every": 3})
    return folder


def test_stopped_anywhere_on_the_way_it_continues_with_the_same_command(small, pair, tmp_path, monkeypatch):
    """It never passes for complete in between, and no file is half one run's and half the other's."""
    run = tmp_path / "run"
    shutil.copytree(pair / "short", run)
    for place, (function, match) in enumerate(STEPS):
        with monkeypatch.context() as patch:
            _stop_at(patch, function, match)
            with pytest.raises(KeyboardInterrupt):
                train(small, run, 4, eval={"every": 3})
        assert is_finished(run) == (place == 0)
        earlier = (run / "summary.json", *run.glob("adapters/*/adapter_config.json"))
        assert all(path.exists() for path in earlier) and len(earlier) == 4  # for whoever reads them meanwhile
    train(small, run, 4, eval={"every": 3})
    assert is_finished(run)
    assert equal_runs.files(run, "needs/") == equal_runs.files(pair / "long", "needs/")


def _stop_at(patch: Any, function: str, match: str) -> None:
    """Ctrl-C in the place of a call whose arguments name a path of a test with `match` in it."""
    module, _, path = function.partition(":")
    owner: Any = __import__(module, fromlist=["x"])
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def stopping(*args: Any, **options: Any) -> Any:
        named = " ".join(map(str, args))
        if not match or (match in named and "pytest" in named):
            raise KeyboardInterrupt
        return real(*args, **options)

    patch.setattr(owner, name, stopping)


def test_fewer_rounds_than_are_done_are_refused(small, pair, llm_fed):
    before = equal_runs.files(pair / "long", "needs/")
    config = small.config(pair / "c.yaml", rounds=3, local=CONSTANT, eval={"every": 3})
    llm_fed("run", config, "--out", pair / "long").assert_refused("has trained 4 rounds", "rounds=4 or more", "--out")
    assert equal_runs.files(pair / "long", "needs/") == before


def test_with_a_falling_rate_it_says_that_results_differ(small, tmp_path):
    falling = {"lr": 0.05, "lr_end": 0.01}
    train(small, tmp_path / "run", 3, local=falling)
    said = train(small, tmp_path / "run", 5, local=falling)
    assert any("what local.lr_end made of the number of rounds until here was for 3" in note for note in said)
    rates = [x["lr"] for x in read_records(tmp_path / "run/metrics.jsonl") if x["kind"] == "round"]
    assert rates == pytest.approx([0.05, 0.03, 0.01, 0.02, 0.01])


def test_a_finished_run_stays_complete_where_only_what_comes_during_training_changed(small, pair):
    before = equal_runs.files(pair / "long", "needs/")
    for settings in ({"every": 2}, {"every": 3, "batch_size": 2}):
        assert [note for note in train(small, pair / "long", 4, eval=settings) if "is complete" in note]
        assert equal_runs.files(pair / "long", "needs/") == before


def _scores(patch: Any, means: dict[int, float]) -> None:
    """What is scored during training has these means, by round."""
    plain = build.evaluate
    scored: list[int] = []

    def evaluate(personal: Any, clients: Any, runtime: Any, *, split: str, **options: Any) -> Any:
        found = plain(personal, clients, runtime, split=split, **options)
        left = [round for round in means if round not in scored]
        if not left:
            return found
        scored.append(left[0])
        return type(found)(**{**vars(found), "mean": means[left[0]]})

    patch.setattr(build, "evaluate", evaluate)


def test_another_selection_of_a_finished_run_is_made_without_training(small, tmp_path, monkeypatch):
    _scores(monkeypatch, {1: 99.0, 2: 20.0, 3: 30.0})
    train(small, tmp_path / "best", 3, eval={"every": 1, "base": "auto"})
    _scores(monkeypatch, {1: 99.0, 2: 20.0, 3: 30.0})
    train(small, tmp_path / "last", 3, eval={"every": 1, "base": "auto", "select": "last"})
    assert json.loads((tmp_path / "best/summary.json").read_text())["round"] == 1
    trained = timed_rounds(tmp_path / "best")
    train(small, tmp_path / "best", 3, eval={"every": 1, "base": "auto", "select": "last"})
    assert equal_runs.files(tmp_path / "best", "needs/") == equal_runs.files(tmp_path / "last", "needs/")
    assert timed_rounds(tmp_path / "best") == trained


def test_what_starts_from_other_runs_extends_these_and_merges_anew(small, tmp_path):
    settings = {"method": {"name": "potara", "samples": 2}, "eval": {"every": 3}}
    train(small, tmp_path / "long", 4, **settings)
    train(small, tmp_path / "short", 2, **settings)
    with pytest.raises(UserError, match="has trained 2 rounds"):
        train(small, tmp_path / "short", 1, **settings)
    assert (tmp_path / "short/summary.json").exists()
    train(small, tmp_path / "short", 4, **settings)
    for part in ("", "needs/local", "needs/fedit"):
        short, long = (
            equal_runs.without_neighbours(equal_runs.files(tmp_path / run / part, "needs/"))
            for run in ("short", "long")
        )
        assert short == long


def test_what_may_not_change_is_still_refused(small, pair, llm_fed):
    config = small.config(pair / "c.yaml", rounds=9, local={**CONSTANT, "steps": 3}, eval={"every": 3})
    llm_fed("run", config, "--out", pair / "long").assert_refused(
        "another configuration (local.steps: 1 -> 3)", "rounds, eval.every", "--fresh"
    )
    last = small.config(pair / "last.yaml", rounds=9, local=CONSTANT, eval={"every": 3, "of_last": 2})
    llm_fed("run", last, "--out", pair / "long").assert_refused("eval.of_last: None -> 2")
    words = ("eval.metric=rougeL", "local.steps=1")
    llm_fed("run", config, *words, "--out", pair / "long").assert_refused("eval.metric: 'rouge1' -> 'rougeL'")


def test_a_run_over_a_network_is_extended_alike(small, tmp_path, quick):
    """The nodes take the configuration of the app that is started again; memories are those of the checkpoint."""
    lines = {}
    for name, chain in {"long": [3], "short": [2, 3]}.items():
        (tmp_path / name).mkdir()
        for rounds in chain:
            settings = network.tree(small, rounds=rounds, local=CONSTANT, eval={"every": 3}, method={"name": "fedsa"})
            link = network.NetworkInProcess(tmp_path / name, small, settings)
            server.train(configfile.from_dict(settings), tmp_path / name / "run", link)
        lines[name] = [
            {key: value for key, value in line.items() if not key.startswith("bytes")}
            for line in read_records(tmp_path / name / "run/metrics.jsonl")
        ]
    assert lines["short"] == lines["long"]


@pytest.mark.parametrize(
    ("local", "rates"),
    [
        ({}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"schedule": "cosine"}, [1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ({"lr_end": 1.0}, [1.0] * 5),
    ],
    ids=str,
)
def test_the_learning_rate_of_a_round(local, rates):
    config = toy.config(rounds=5, local={"lr": 1.0, "lr_end": 0.0, **local})
    assert [config.lr(round) for round in range(1, 6)] == pytest.approx(rates, abs=1e-6)
