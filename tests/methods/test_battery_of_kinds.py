"""Every method that trains adapters passes the battery on pairs of answers, with DoRA, beside a head, on classifiers of
texts and on the experts of a mixture, or says why it cannot."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import every
import mixtures
import pytest
import torch
from battery import FEDERATED, OF_PICTURES, SETTINGS, SLACK

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.testing import federation, tiny
from llm_fed.testing.battery import CHECKS, Slack

NAMES = [name for name in FEDERATED if not name.endswith(OF_PICTURES)]
SAYS = (  # what depends most on the kind of model
    "every message survives the wire", "all clients at once is 1 at a time", "the loss falls",
    "killed in every round but the first and continued is uninterrupted",
)  # fmt: skip


@cache
def mixture(dtype: torch.dtype = torch.float64) -> Any:
    return tiny.language_base(mixtures.build("mixtral", dtype))


EXPERTS = ("experts.down_proj", "experts.gate_up_proj")
KINDS = {
    "pairs": federation.PAIRS,
    "classifiers": federation.CLASSIFIERS,
    "dora": replace(
        federation.PAIRS, words="DoRA on pairs of answers", structure=replace(federation.STRUCTURE, dora=True),
        config={**federation.OBJECTIVE, "adapter": {"dora": True}},
    ),
    "dora and a head": replace(
        federation.CLASSIFIERS, words="DoRA of a RoBERTa with a head",
        structure=replace(federation.CLASSIFIERS.structure, dora=True),
        config={**federation.CLASSIFIERS.config, "adapter": {"dora": True}},
    ),
    "experts": replace(
        federation.ADAPTERS, words="adapters on the experts of a Mixtral", base=mixture, falls=0.05,
        structure=replace(federation.STRUCTURE, parameters=EXPERTS),
        config={"adapter": {"target_parameters": list(EXPERTS), "dropout": 0.0}},
    ),
}  # fmt: skip
REASONS = {"dora": "adapter.dora=false", "dora and a head": "adapter.dora=false", "experts": "target_parameters"}
# A correction, a model of one's own, clusters, stacked adapters.
QUICK = {"pairs": ["feddpa"], "classifiers": ["scaffold", "feddpa", "ifca", "flora"]}
OTHERS = ["ifca", "feddpa", "flora"]
CASES = [(kind, name) for kind in KINDS for name in NAMES]


def checked(kind: str, name: str, checks: Iterable[str], folder: Path) -> None:
    """One uninterrupted run serves all checks."""
    settings, setup = {"name": name, **SETTINGS.get(name, {})}, KINDS[kind]
    if name == "scaffold":  # which takes SGD alone
        lr = 0.2 if setup.labels else 0.5
        setup = setup.training(["local.optimizer=sgd", f"local.lr={lr}", f"local.lr_end={lr}"])
    try:
        if reason := setup.refusal(methods.build(settings), settings):
            raise UserError(reason)
        whole = federation.go(settings, setup, folder / "whole")
    except UserError as error:
        assert kind in REASONS and REASONS[kind] in str(error)
        return
    places = {says: folder / str(number) for number, says in enumerate(CHECKS)}
    every.passes(checks, lambda says: CHECKS[says](whole, places[says], SLACK.get(name, Slack())))


@pytest.mark.parametrize(
    ("kind", "name"), every.quick(CASES, [(kind, name) for kind in KINDS for name in QUICK.get(kind, OTHERS)])
)
def test_every_method_trains_it_or_says_why_not(kind, name, tmp_path):
    checked(kind, name, SAYS, tmp_path)


@pytest.mark.parametrize("name", ["fml", "fedproto", "fd", "fedapen", "fedkd", "fedmoe"])
def test_methods_of_whole_models_say_why_not(name):
    said = federation.CLASSIFIERS.refusal(methods.build({"name": name}), {"name": name})
    assert "whole image models; set adapter=null" in said
