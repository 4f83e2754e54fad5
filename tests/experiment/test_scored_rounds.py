"""Which rounds are scored, on which split, and which of them is the best: `eval.every`, `during` and `of_last`."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_images
import toy

from llm_fed.bench import build
from llm_fed.experiment import run as experiment
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, Scoring, federate
from llm_fed.methods.fedit import FedIT
from llm_fed.runs import tracking
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.scoring.scores import Summary, summarize
from llm_fed.settings.configfile import from_dict

SCORES = {1: 5.0, 2: 90.0, 3: 10.0, 4: 20.0, 5: 20.0}


@pytest.mark.parametrize(
    "settings, rounds, best",
    [
        ({"every": 1}, [1, 2, 3, 4, 5], 2),
        ({"every": 1, "of_last": 4}, [1, 2, 3, 4, 5], 2),
        ({"every": 1, "of_last": 3}, [1, 2, 3, 4, 5], 5),
        ({"every": 1, "of_last": 1}, [1, 2, 3, 4, 5], 5),
        ({"every": 1, "of_last": 9}, [1, 2, 3, 4, 5], 2),
        ({"every": 2}, [2, 4, 5], 2),
        ({"every": 2, "of_last": 2}, [2, 4, 5], 5),
        ({"every": 5, "of_last": 1}, [5], 5),
        ({"every": 0, "of_last": 1}, [5], 5),
        ({"every": 3, "of_last": 2, "during": "test"}, [3, 5], 5),
    ],
)
def test_the_best_of_the_last_scores(tmp_path, settings, rounds, best):
    """The last round always counts as one; its checkpoint and the best one's, the last of equals, are kept. So is that
    of the best round before one that is scored only because it is the last: the run may be extended."""
    asked, lines, checkpoints, progress = go(tmp_path, 5, settings, lambda round: summary_of(SCORES[round]))
    regular = not settings["every"] or best % settings["every"] == 0
    before = best if regular else rounds[-2]
    assert checkpoints == sorted({before, 5})
    split = settings.get("during", "validation")
    assert [(line["round"], line["split"]) for line in lines] == [(round, split) for round in rounds]
    assert asked == [split] * len(rounds)
    assert (progress.best.round, progress.best.score) == (best, SCORES[best])


def summary_of(score: float, loss: float | None = None) -> Summary:
    return summarize("accuracy", {"c0": score}, {} if loss is None else {"c0": loss})


def go(tmp_path, rounds: int, settings: dict[str, Any], scored: Callable[[int], Summary]) -> Any:
    """A federation of two closed-form clients with given scores of its rounds: which splits were asked, the lines of
    scores, which checkpoints remain, and the progress."""
    clients, server, asked = toy.clients(2), toy.server(), []
    server.clients, server.cohort = tuple(clients), 2

    runtime = toy.ToyRuntime({"c0": 1.0, "c1": 2.0})

    def evaluate(messages: Any, split: str) -> Summary:
        asked.append(split)
        return scored(server.round)

    with Run(tmp_path / "run", toy.config(rounds=rounds, eval=settings, checkpoint={"keep": 1})) as run:
        run.begin()
        federation = Federation(FedIT(), LocalClients(clients, toy.everyone(clients), runtime), server, runtime)
        progress = federate(federation, run, Scoring(clients, evaluate))
        checkpoints = run.checkpoints.rounds()
    lines = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "score"]
    return asked, lines, checkpoints, progress


NAN, INF = math.nan, math.inf


def test_one_model_is_tested_at_the_server(tmp_path):
    """As in the Feddle paper's experiments: the server has the test split, which is scored during training, too."""
    path = tiny_images.npz(tmp_path / "a.npz", train=24, test=20)
    tree = tiny_images.tree(
        path, task={"server": {"examples": 8, "test": True}, "validation": 0.0}, eval={"every": 2, "during": "test",
        "of_last": 1}, method={"name": "feddle"},
    )  # fmt: skip
    built = build.prepare(from_dict(tree), tracking.Reporter())
    assert list(built.scored) == ["server"]
    assert (len(built.server.train), len(built.server.data.queries["test"])) == (8, 12)
    assert not any(site.data.queries["test"] or site.data.held_out for site in built.clients.values())
    assert sum(site.num_examples for site in built.clients.values()) == 24
    summary = experiment.train(from_dict(tree), tmp_path / "run")
    lines = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "score"]
    assert [(line["round"], line["split"]) for line in lines] == [(2, "test"), (3, "test"), (3, "test")]
    assert summary["round"] == 3 and summary["scores"]["clients"] == {"server": lines[1]["mean"]}
    assert set(lines[0]["losses"]) == {"server"} and lines[0]["loss"] == lines[0]["losses"]["server"] > 0
    assert set(summary["scores"]["clients"]) == {path.name for path in (tmp_path / "run/adapters").iterdir()}
