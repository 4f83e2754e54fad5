"""Which rounds are scored, on which split, and which is the best; and the loss beside each score."""

import json
from pathlib import Path
from typing import Any

import every
import pytest
import small_run
import tiny_images
import torch
import toy
from rich.console import Console
from torch import nn

from llm_fed.bench import build
from llm_fed.commands import evaluate
from llm_fed.engine.bank import AdapterBank
from llm_fed.experiment import run
from llm_fed.experiment import run as experiment
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, Scoring, federate
from llm_fed.methods.fedit import FedIT
from llm_fed.runs import tracking
from llm_fed.runs.checkpoint import rounds_in
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
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
    asked, lines, checkpoints, progress = go(tmp_path, settings)
    regular = not settings["every"] or best % settings["every"] == 0
    before = best if regular else rounds[-2]
    assert checkpoints == sorted({before, 5})
    split = settings.get("during", "validation")
    assert [(line["round"], line["split"]) for line in lines] == [(round, split) for round in rounds]
    assert asked == [split] * len(rounds)
    assert (progress.best.round, progress.best.score) == (best, SCORES[best])


def go(tmp_path, settings: dict[str, Any]) -> Any:
    """A federation of two closed-form clients whose rounds have SCORES: which splits were asked, the lines of scores,
    which checkpoints remain, and the progress."""
    clients, server, asked = toy.clients(2), toy.server(), []
    server.clients, server.cohort = tuple(clients), 2
    runtime = toy.ToyRuntime({"c0": 1.0, "c1": 2.0})

    def evaluate(messages: Any, split: str) -> Summary:
        asked.append(split)
        return summarize("accuracy", {"c0": SCORES[server.round]}, {})

    with Run(tmp_path / "run", toy.config(rounds=5, eval=settings, checkpoint={"keep": 1})) as run:
        run.begin()
        federation = Federation(FedIT(), LocalClients(clients, toy.everyone(clients), runtime), server, runtime)
        progress = federate(federation, run, Scoring(clients, evaluate))
        checkpoints = rounds_in(run.checkpoints.folder)
    return asked, score_lines(tmp_path / "run"), checkpoints, progress


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


# The loss beside each score, of the same examples under the same personal model


def score_lines(folder: Path) -> list[dict]:
    return [line for line in read_records(folder / "metrics.jsonl") if line["kind"] == "score"]


def loss_of_text(built, site, state, queries) -> float:
    """One example at a time, each with the mixing weights of its own prompt: the mean over all target tokens."""
    total, count = 0.0, 0
    bank = AdapterBank(built.base.model, site.structure, 1, state.row.dtype)
    bank.load(0, state)
    for query in queries:
        ids, target = torch.tensor(query.example.input_ids), torch.tensor(query.example.target)
        mix = built.base.mixing_weights(site.structure, [(state, query.prompt)])
        with bank.attached(torch.tensor([0]), mix=mix), torch.no_grad():
            logits = built.base.model(input_ids=ids[None]).logits[0, :-1]
        losses = nn.functional.cross_entropy(logits.double(), ids[1:], reduction="none")[target[1:]]
        total, count = total + float(losses.sum()), count + len(losses)
    return total / count


@pytest.mark.parametrize(
    "method, loss_on, during, limit",
    [
        pytest.param("fedit", "response", "validation", None, marks=pytest.mark.slow),
        ("fedit", "all", "test", 2),
        pytest.param("fedmerge", "response", "validation", None, marks=pytest.mark.slow),
        ("pfedmoe", "response", "validation", None),
        pytest.param("fedem", "response", "test", None, marks=pytest.mark.slow),
        pytest.param("feddpa", "response", "test", 2, marks=pytest.mark.slow),
        ("feddpa", "all", "validation", None),
    ],
)
def test_loss_of_text(small, tmp_path, method, loss_on, during, limit):
    """Of plain adapters, routed experts, mixtures, and experts whose weights depend on the prompt."""
    evaluation = {"during": during, "limit": limit, "select": "last"}
    config = from_dict(small.tree(method={"name": method}, task={"loss_on": loss_on}, eval=evaluation))
    summary = run.train(config, tmp_path / "run", reporter=Reporter(Console(quiet=True)))
    built, states = evaluate.reopen(tmp_path / "run", config)
    expected = {
        id: loss_of_text(built, site, states[id], site.data.queries["test"][:limit])
        for id, site in built.scored.items()
    }
    assert {len(site.data.queries["test"]) for site in built.scored.values()} == {limit or small_run.SIZES["test"]}
    assert summary["scores"]["losses"] == pytest.approx(expected, rel=1e-4)
    assert summary["scores"]["loss"] == pytest.approx(sum(expected.values()) / 3, rel=1e-4)
    lines = [line for line in score_lines(tmp_path / "run") if line["round"]]  # without the base alone
    assert [line["split"] for line in lines] == [during] * 3 + ["test"]
    if during == "test":
        assert lines[-2]["losses"] == pytest.approx(expected, rel=1e-4)
    again = evaluate.evaluate_run(tmp_path / "run", settings=[f"eval.limit={limit}"] if limit else [])
    assert again["scores"]["losses"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", every.quick(["fedavg", "fedmoe", "fml", "fedapen", "fedem"], ["fedavg", "fedmoe"]))
def test_loss_of_pictures(tmp_path, method):
    """Of one whole model and of several side by side: what they say together."""
    path = tiny_images.npz(tmp_path / "a.npz")
    config = from_dict(tiny_images.tree(path, rounds=1, method={"name": method}, eval={"select": "last"}))
    summary = run.train(config, tmp_path / "run", reporter=Reporter(Console(quiet=True)))
    built, states = evaluate.reopen(tmp_path / "run", config)
    expected = {}
    for id, site in built.scored.items():
        pictures = site.data.queries["test"]
        (answer,) = built.runtime.run({id: site.answers(states[id], pictures)}).values()
        chances = answer.logits.double().softmax(1)[range(len(pictures)), [p.label for p in pictures]]
        expected[id] = -float(chances.log().mean())
    assert summary["scores"]["losses"] == pytest.approx(expected, rel=1e-4)


def test_answers_that_training_would_not_see_have_no_loss(small, tmp_path):
    """With max_length 6 a prompt of two words fits, also with two more words and the end of the text, but not with six
    more: one of ada's answers counts and none of bob's, so he has no loss and the mean is that of the others."""
    data = small_run.write_data(tmp_path / "data")
    long = {"instruction": "w20 w21", "output": "w4 w5 w6 w7 w8 w9"}
    for client, count in (("ada", 2), ("bob", 3)):
        file = data / client / "test.jsonl"
        rows = [long] * count + [json.loads(line) for line in file.read_text().splitlines()][count:]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = from_dict(small.tree(rounds=1, task={"path": str(data), "max_length": 6}))
    scores = run.train(config, tmp_path / "run")["scores"]
    assert set(scores["clients"]) == {"ada", "bob", "cyd"} and set(scores["losses"]) == {"ada", "cyd"}
    assert scores["loss"] == pytest.approx((scores["losses"]["ada"] + scores["losses"]["cyd"]) / 2)
