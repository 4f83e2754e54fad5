"""The loss beside each score: of the same examples under the same personal model, whatever a client's model is."""

import json
from pathlib import Path

import every
import pytest
import small_run
import tiny_images
import torch
from rich.console import Console
from torch import nn

from llm_fed.commands import evaluate
from llm_fed.engine.bank import AdapterBank
from llm_fed.experiment import run
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict


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
    assert again.losses == pytest.approx(expected, rel=1e-4)


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
