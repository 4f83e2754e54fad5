"""Every method that trains adapters passes the battery with DoRA on pairs of answers and beside a head, and on the
experts of a mixture, or says why it cannot."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from battery import FEDERATED, OF_PICTURES, SETTINGS, SLACK

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.testing import federation, tiny
from llm_fed.testing.battery import CHECKS, Slack

NAMES = [name for name in FEDERATED if not name.endswith(OF_PICTURES)]
QUICK = ("ifca", "feddpa", "flora")
LOCAL = {  # scaffold takes SGD alone
    "dora and a head": ["local.optimizer=sgd", "local.lr=0.2", "local.lr_end=0.2"],
    "dora": ["local.optimizer=sgd", "local.lr=0.5", "local.lr_end=0.5"],
    "experts": ["local.optimizer=sgd", "local.lr=0.5", "local.lr_end=0.5"],
}
SAYS = (
    "every message survives the wire", "all clients at once is 1 at a time", "the loss falls",
    "killed in every round but the first and continued is uninterrupted",
)  # fmt: skip


@cache
def mixture(dtype: torch.dtype = torch.float64) -> Any:
    return tiny.language_base(mixtures.build("mixtral", dtype))


KINDS = {
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
        structure=replace(federation.STRUCTURE, parameters=("experts.down_proj", "experts.gate_up_proj")),
        config={"adapter": {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"], "dropout": 0.0}},
    ),
}  # fmt: skip
REASONS = {
    "dora": "adapter.dora=false",
    "dora and a head": "adapter.dora=false",
    "experts": "leave out adapter.target_parameters",
}


def checked(name: str, kind: str, folder: Path) -> None:
    settings = {"name": name, **SETTINGS.get(name, {})}
    setup = KINDS[kind]
    if reason := setup.refusal(methods.build(settings), settings):
        assert REASONS[kind] in reason
        return
    try:
        whole = federation.go(settings, setup.training(LOCAL[kind] if name == "scaffold" else ()), folder / "whole")
    except UserError as error:
        assert REASONS[kind] in str(error)
        return
    for number, says in enumerate(SAYS):
        CHECKS[says](whole, folder / str(number), SLACK.get(name, Slack()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_method_trains_it_or_says_why_not(name, kind, tmp_path):
    checked(name, kind, tmp_path)
