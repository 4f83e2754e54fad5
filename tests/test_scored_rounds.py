"""Which rounds are scored, on which split, and which of them is the best: `eval.every`, `during` and `of_last`."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_images
import toy

from llm_fed import experiment
from llm_fed.clients import LocalClients
from llm_fed.configfile import from_dict
from llm_fed.eval.scores import summarize
from llm_fed.federation import federate
from llm_fed.methods.fedit import FedIT
from llm_fed.run import Run, read_records

SCORES = {1: 5.0, 2: 90.0, 3: 10.0, 4: 20.0, 5: 20.0}


@pytest.mark.parametrize(
    "settings, rounds, best",
    [
        ({"every": 1}, [1, 2, 3, 4, 5], 2),
        ({"every": 1, "of_last": 4}, [1, 2, 3, 4, 5], 2),
        ({"every": 1, "of_last": 3}, [1, 2, 3, 4, 5], 4),
        ({"every": 1, "of_last": 1}, [1, 2, 3, 4, 5], 5),
        ({"every": 1, "of_last": 9}, [1, 2, 3, 4, 5], 2),
        ({"every": 2}, [2, 4, 5], 2),
        ({"every": 2, "of_last": 2}, [2, 4, 5], 4),
        ({"every": 5, "of_last": 1}, [5], 5),
        ({"every": 0, "of_last": 1}, [5], 5),
        ({"every": 3, "of_last": 2, "during": "test"}, [3, 5], 5),
    ],
)
def test_the_best_of_the_last_scores(tmp_path, settings, rounds, best):
    """The last round always counts as one; its checkpoint and the best one's, the first of equals, are kept."""
    clients, server, asked = toy.clients(2), toy.server(), []
    server.clients, server.cohort = tuple(clients), 2

    runtime = toy.ToyRuntime({"c0": 1.0, "c1": 2.0})

    def evaluate(messages: Any, split: str) -> Any:
        asked.append(split)
        return summarize("accuracy", {"c0": SCORES[round_now()]})

    def round_now() -> int:
        return server.round

    with Run(tmp_path / "run", toy.config(rounds=5, eval=settings, checkpoint={"keep": 1})) as run:
        run.begin()
        progress = federate(
            FedIT(), LocalClients(clients, toy.everyone(clients), runtime), server, runtime, run, evaluate,
            rounds=5, lr=lambda round: 0.1,
        )  # fmt: skip
        assert run.checkpoints.rounds() == sorted({best, 5})
    lines = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "score"]
    split = settings.get("during", "validation")
    assert [(line["round"], line["split"]) for line in lines] == [(round, split) for round in rounds]
    assert asked == [split] * len(rounds)
    assert (progress.best_round, progress.best_score) == (best, SCORES[best])


def test_one_model_is_tested_at_the_server(tmp_path):
    """As in the Feddle paper's experiments: the server has the test split, which is scored during training, too."""
    path = tiny_images.npz(tmp_path / "a.npz", train=24, test=20)
    tree = tiny_images.tree(
        path, task={"server": {"examples": 8, "test": True}, "validation": 0.0}, eval={"every": 2, "during": "test",
        "of_last": 1}, method={"name": "feddle"},
    )  # fmt: skip
    built = experiment.prepare(from_dict(tree), experiment.Reporter())
    assert list(built.scored) == ["server"]
    assert (len(built.server.train), len(built.server.queries["test"])) == (8, 12)
    assert not any(site.queries["test"] or site.held_out for site in built.clients.values())
    assert sum(site.num_examples for site in built.clients.values()) == 24
    summary = experiment.train(from_dict(tree), tmp_path / "run")
    lines = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "score"]
    assert [(line["round"], line["split"]) for line in lines] == [(2, "test"), (3, "test"), (3, "test")]
    assert summary["round"] == 3 and summary["scores"]["clients"] == {"server": lines[1]["mean"]}
    assert set(summary["scores"]["clients"]) == {path.name for path in (tmp_path / "run/adapters").iterdir()}
