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
from preference_runs import pairs_of_words
from transformers import RobertaConfig, RobertaForSequenceClassification

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.kinds.sentences import Sentence
from llm_fed.kinds.sequences import Sequences
from llm_fed.models.lora import Lora
from llm_fed.settings.config import LocalConfig
from llm_fed.settings.configfile import from_dict
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


@cache
def sequence_base(dtype: torch.dtype = torch.float64) -> Sequences:
    """A base of a RoBERTa with a head."""
    shape = {name: value for name, value in tiny.HEADS.items() if name != "num_key_value_heads"}
    shape |= {"num_labels": tiny.CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    model = tiny.drawn(lambda: RobertaForSequenceClassification(RobertaConfig(**shape)), 0).to(dtype).eval()
    return Sequences(
        model=model, tokenizer=tiny.tokenizer(**tiny.SPECIAL), name="tiny", dtype=dtype, head=HEAD[-1],
        before_head=HEAD[:-1], labels=tuple(f"class {label}" for label in range(tiny.CLASSES)), fresh=HEAD,
    )  # fmt: skip


def sentences_of(client: int, size: int) -> list[Sentence]:
    """Words of two of four classes, each of which has three of its own; the next client holds one of the two, too."""
    draws, found = torch.Generator().manual_seed(client), []
    for label in [(client + number % 2) % tiny.CLASSES for number in range(size)]:
        length = 2 + int(torch.randint(4, (), generator=draws))
        words = torch.randint(2 + 3 * label, 5 + 3 * label, (length,), generator=draws).tolist()
        found.append(Sentence(words, [], label))
    return found


HEAD = ("classifier.dense", "classifier.out_proj")
EXPERTS = ("experts.down_proj", "experts.gate_up_proj")
CLASSIFIERS = federation.Setup(
    "adapters of a RoBERTa with a head", sequence_base,
    Lora(rank=2, alpha=8, dropout=0.0, target_modules=("query", "value"), whole=HEAD),
    LocalConfig(steps=4, batch_size=4, lr=0.01), sentences_of, fused=True, falls=0.02, least=1000,
    config={"task": {"name": "classification"}, "base": {"kind": "sequence-classification"}},
    labels=tuple(map(str, range(tiny.CLASSES))),
)  # fmt: skip
OBJECTIVE: dict[str, Any] = {"objective": {"name": "dpo", "beta": 0.3}}
PAIRS = replace(
    federation.ADAPTERS, words="adapters of a LLaMA, on pairs of answers", objective=from_dict(OBJECTIVE).objective,
    base=lambda dtype: federation.language_base(dtype).configured(from_dict(OBJECTIVE)), examples=pairs_of_words,
    falls=0.02, config=OBJECTIVE,
)  # fmt: skip
KINDS = {
    "pairs": PAIRS,
    "classifiers": CLASSIFIERS,
    "dora": replace(
        PAIRS, words="DoRA on pairs of answers", structure=replace(federation.STRUCTURE, dora=True),
        config={**OBJECTIVE, "adapter": {"dora": True}},
    ),
    "dora and a head": replace(
        CLASSIFIERS, words="DoRA of a RoBERTa with a head",
        structure=replace(CLASSIFIERS.structure, dora=True),
        config={**CLASSIFIERS.config, "adapter": {"dora": True}},
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
    said = CLASSIFIERS.refusal(methods.build({"name": name}), {"name": name})
    assert "whole image models; set adapter=null" in said
