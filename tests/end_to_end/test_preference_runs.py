"""Runs that learn from preferences, from files to adapters, and what is refused before them."""

import json
from pathlib import Path
from types import SimpleNamespace

import every
import pytest
from network import NETWORK, federate
from small_run import CLIENTS

from llm_fed.audit.audit import audit
from llm_fed.basics.errors import UserError
from llm_fed.engine.fit import FusedFit
from llm_fed.experiment import run as experiment
from llm_fed.runs.records import read_records
from llm_fed.settings.configfile import from_dict

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def wards(tmp_path_factory) -> Path:
    """Pairs: each client has a word that it likes, and rejects that of the next one."""
    folder = tmp_path_factory.mktemp("pairs")
    words = list(CLIENTS.values())
    for number, client in enumerate(CLIENTS):
        (good, end), (bad, _) = words[number], words[(number + 1) % 3]
        for split, size in {"train": 6, "validation": 2, "test": 3}.items():
            rows = [
                {"prompt": f"w{20 + i} w{21 + i}", "chosen": f"w{good} w{end}", "rejected": f"w{bad}"}
                for i in range(size)
            ]
            path = folder / client / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(small, wards, **changes):
    task = {"path": str(wards), **changes.pop("task", {})}
    changes.setdefault("objective", {"name": "dpo", "beta": 0.5})
    evaluation = {"metric": None, **changes.pop("eval", {})}
    return from_dict(small.tree(task=task, eval=evaluation, **changes))


def test_a_run_learns_what_is_preferred_and_says_how_sure_it_is(small, wards, tmp_path):
    config = settings(small.as_usual(), wards, method={"name": "local"}, local={"steps": 6})
    summary = experiment.train(config, tmp_path / "run")
    scores, base = summary["scores"], summary["base"]
    assert scores["metric"] == "preference_accuracy" and base["mean"] == 50.0 < scores["mean"] == 100.0
    assert base["beside"]["margin"]["mean"] == 0.0 < scores["beside"]["margin"]["mean"]
    assert set(scores["beside"]["margin"]["clients"]) == set(CLIENTS) and "rouge1" in scores["beside"]
    assert base["loss"] == pytest.approx(0.693147, abs=1e-5) and scores["loss"] < 0.6
    assert set(summary["rule"]["rules"].values()) == {"longer answer"}
    losses = [line["loss"] for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "round"]
    assert losses[-1] < losses[0]
    card = (tmp_path / "run/adapters/ada/README.md").read_text()
    assert "the loss DPO (Rafailov et al. 2023), beta 0.5, against the frozen base" in card
    assert "| preference_accuracy | 100.00 |" in card and "| rouge1 |" in card and "- dpo" in card
    assert (tmp_path / "run/samples.jsonl").read_text().count("\n") == 9


@pytest.mark.parametrize("reference", every.quick(["base", "last"], ["last"]))
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(small, wards, tmp_path, monkeypatch, reference):
    config = settings(small, wards, objective={"name": "dpo", "reference": reference})
    experiment.train(config, tmp_path / "whole")
    step, calls = FusedFit.step, []

    def dying(self, *given):
        calls.append(given)
        if len(calls) == 6:  # in the last of the three rounds, of two steps each
            raise KeyboardInterrupt
        return step(self, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FusedFit, "step", dying)
        experiment.train(config, tmp_path / "parts")
    experiment.train(config, tmp_path / "parts")
    whole, parts = (
        [line for line in read_records(tmp_path / name / "metrics.jsonl") if line["kind"] in ("round", "score")]
        for name in ("whole", "parts")
    )
    assert parts == whole and not audit(tmp_path / "parts", every=True).findings


def test_judged_answers(small, tmp_path):
    for client, (good, end) in CLIENTS.items():
        rows = [
            {"prompt": f"w{20 + i}", "completion": f"w{good} w{end}" if i % 2 else "w50", "label": bool(i % 2)}
            for i in range(10)
        ]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(small, tmp_path / "data", objective={"name": "kto", "beta": 0.5}, local={"steps": 8})
    summary = experiment.train(config, tmp_path / "run")
    assert summary["scores"]["mean"] > 80 and summary["scores"]["beside"]["margin"]["mean"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"name": "kto", "gamma": 0.1}}, "objective.gamma=0.1 is for simpo"),
        ({"objective": {"name": "orpo", "reference": "last"}}, "objective.reference=last is for dpo, ipo, kto"),
        ({"objective": {"name": "sft", "beta": 0.1}}, "objective.beta=0.1 is for dpo, ipo, kto"),
        ({"objective": {"name": "dpoo"}}, "objective.name"),
        ({"task": {"loss_on": "all"}}, "task.loss_on=all would count the prompts"),
        ({"objective": {"name": "kto"}}, r"objective.name=kto learns.*has no label.*objective.name=dpo"),
        (
            {"objective": {"name": "kto"}, "privacy": {"unit": "example", "clip": 1.0}},
            "privacy.unit=example clips the gradient of each example, but the loss of KTO",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(small, wards, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        experiment.train(settings(small, wards, **changes), tmp_path / "run")


def test_pairs_are_needed_for_their_loss_and_their_score(small, wards, tmp_path):
    plain = {"path": str(small.data)}
    with pytest.raises(UserError, match=r"(train|validation).jsonl, line 1: .*has no rejected answer"):
        experiment.train(settings(small, wards, task=plain), tmp_path / "one")
    with pytest.raises(UserError, match="so there is no preference_accuracy"):
        config = settings(small, wards, task=plain, objective={"name": "sft"}, eval={"metric": "preference_accuracy"})
        experiment.train(config, tmp_path / "two")


def test_a_network_gives_the_same_numbers(small, wards, tmp_path):
    """Each node has the pairs of one client, and computes what its base makes of them by itself."""
    changes = {"rounds": 2, "objective": {"name": "dpo", "beta": 0.5, "reference": "last"}, "network": NETWORK}
    settings_of = small.tree(task={"path": str(wards)}, eval={"metric": None, "base": False}, **changes)
    here = experiment.train(from_dict(settings_of), tmp_path / "here")
    link, there = federate(tmp_path / "there", SimpleNamespace(data=wards), settings_of)
    assert there["scores"]["clients"] == here["scores"]["clients"] and set(link.names.values()) == set(CLIENTS)
    for name in ("margin", "rouge1"):
        assert there["scores"]["beside"][name]["clients"] == pytest.approx(
            here["scores"]["beside"][name]["clients"], rel=1e-4
        )
    assert here["scores"]["beside"]["margin"]["mean"] > 0
