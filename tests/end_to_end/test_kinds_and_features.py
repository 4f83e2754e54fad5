"""Every kind of training with everything that a run may have beside it: rules, noise, delay, resume, audit, reports."""

from types import SimpleNamespace
from typing import Any

import mixtures
import pytest
import torch
from classifiers import federation, written
from classifiers import tree as tree_of_labels
from preference_files import pairs_of

from llm_fed.audit.audit import audit
from llm_fed.experiment import run as experiment
from llm_fed.settings.configfile import from_dict
from llm_fed.testing.tiny import SPECIAL, tokenizer

pytestmark = pytest.mark.usefixtures("quick")

SECTIONS: dict[str, dict[str, Any]] = {
    "median": {"server": {"aggregation": "median", "liars": 0.4}},
    "geometric median": {"server": {"aggregation": "geometric-median", "liars": 0.4}},
    "trimmed mean": {"server": {"aggregation": "trimmed-mean", "liars": 0.34}},
    "delay": {"delay": {"sigma": 1.0}},
    "fedbuff": {"method": {"name": "fedbuff", "buffer": 2}},
    "privacy of clients": {"privacy": {"clip": 1.0, "noise": 0.1}},
    "privacy of examples": {"privacy": {"unit": "example", "clip": 1.0, "noise": 0.5}},
}
DPO = {"name": "dpo", "beta": 0.5}
KINDS = ("dpo", "dora", "dora and dpo", "dora and a head", "experts", "experts and dpo")
QUICK = {("dpo", "median"), ("dora and a head", "privacy of examples"), ("experts", "delay")}


@pytest.fixture(scope="module")
def place(small, tmp_path_factory) -> SimpleNamespace:
    """Bases, and data of labels and of pairs."""
    folder = tmp_path_factory.mktemp("kinds")
    mixture, pairs = folder / "mixture", pairs_of(small.data, folder / "pairs")
    mixtures.build("mixtral", torch.float32).save_pretrained(mixture)
    tokenizer(**SPECIAL).save_pretrained(mixture)
    encoder, labels = written(folder / "roberta", "roberta"), federation(folder / "labels")
    return SimpleNamespace(small=small, mixture=mixture, pairs=pairs, encoder=encoder, labels=labels)


def settings(kind: str, place: SimpleNamespace, **sections: Any) -> dict[str, Any]:
    """The configuration of a short run, with sections laid over it."""
    if "head" in kind:
        tree = tree_of_labels(place.encoder, place.labels, rounds=2)
    else:
        tree = place.small.tree(rounds=2, eval={"metric": None})
    if "dpo" in kind:
        tree["objective"], tree["task"]["path"] = DPO, str(place.pairs)
    tree["adapter"]["dora"] = "dora" in kind
    if "experts" in kind:
        tree["base"]["name"] = str(place.mixture)
        tree["adapter"] |= {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"], "dropout": 0.0}
    return tree | sections


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for name in SECTIONS
    ],
)
def test_rules_noise_and_delay(kind, name, place, tmp_path):
    summary = experiment.train(from_dict(settings(kind, place, **SECTIONS[name])), tmp_path / "run")
    assert len(list((tmp_path / "run/adapters").iterdir())) == 3
    assert all(0 <= score <= 100 for score in summary["scores"]["clients"].values())
    assert not audit(tmp_path / "run", every=True).findings
