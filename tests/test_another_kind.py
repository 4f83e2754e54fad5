"""A kind of model and data that llm_fed does not know, defined in this file alone: labelled sentences, and an encoder
with a classification head. It trains, scores, resumes, merges, exports, is audited and served over the network."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import classifiers
import pytest
import torch
from network import NETWORK, NetworkInProcess
from peft import PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, RobertaForSequenceClassification

import llm_fed
from llm_fed.audit.audit import audit
from llm_fed.basics.errors import UserError
from llm_fed.engine.engine import Engine
from llm_fed.engine.examples import Examples
from llm_fed.experiment import run as experiment
from llm_fed.kinds import Kind
from llm_fed.kinds.wording import Wording
from llm_fed.method.requests import Logits
from llm_fed.models.joined import Answer, full, heard
from llm_fed.models.structure import Structure
from llm_fed.network import server
from llm_fed.runs.records import read_records
from llm_fed.settings import plugins
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.tasks import Task
from llm_fed.tasks.common import ClientData, Example, TaskData

LABELS = ("sport", "trade", "weather")
HEAD = "classifier.out_proj"
NAMES = ("test_another_kind:Sentences", "test_another_kind:TASK")  # what run folders name

sys.modules.setdefault("test_another_kind", sys.modules[__name__])  # pytest may call this file otherwise

# The kind


@dataclass(frozen=True)
class Labelled:
    """One sentence."""

    input_ids: list[int]
    label: int


@dataclass(frozen=True)
class Sheet:
    """Sentences side by side, padded on the right."""

    input_ids: Tensor  # (N, T)
    mask: Tensor  # (N, T)
    labels: Tensor  # (N,)

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.labels), device=self.labels.device)


class Classified(Examples):
    """Sentences, each with one label."""

    single: ClassVar[bool] = True

    def length(self, example: Labelled) -> int:
        return len(example.input_ids)

    def num_targets(self, examples: Any) -> int:
        return len(examples)

    def collate(self, examples: Any) -> Sheet:
        ids = [torch.tensor(example.input_ids) for example in examples]
        mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
        labels = torch.tensor([example.label for example in examples])
        return Sheet(pad_sequence(ids, batch_first=True, padding_value=1), mask, labels)

    def answer(self, model: Any, batch: Sheet) -> Answer:
        return heard(model, HEAD, input_ids=batch.input_ids, attention_mask=batch.mask)

    def logits(self, model: Any, batch: Sheet, *, all_rows: bool = False) -> Tensor:
        return full(self.answer(model, batch).logits)


@dataclass(kw_only=True)
class Sentences(Kind):
    """A RoBERTa with a classification head."""

    noun: ClassVar[str] = "sentence classifier"

    @classmethod
    def load(cls, config: Config, task: TaskData | None, device: str) -> Sentences:
        assert task is not None
        model: Any = encoder(config.base.name, len(task.labels)).to(device)
        tokenizer = AutoTokenizer.from_pretrained(config.base.name)
        return cls(model=model, name=config.base.name, head=HEAD, labels=task.labels, tokenizer=tokenizer)

    @classmethod
    def known_labels(cls, config: Config) -> tuple[str, ...]:
        return LABELS

    def examples(self, structure: Structure) -> Classified:
        return Classified()

    def encode(self, examples: Any) -> list[Labelled]:
        asked = self.classified([example.prompt for example in examples])
        labels = [self.labels.index(example.answers[0]) for example in examples]
        return [Labelled(one.input_ids, label) for one, label in zip(asked, labels, strict=True)]

    def classified(self, given: Any) -> list[Labelled]:
        return [Labelled(ids, -1) for ids in self.tokenizer(list(given)).input_ids] if given else []

    def wording(self, structure: Structure) -> Wording:
        return Wording("A personal LoRA adapter and head", "...", "peft", "text-classification")


def encoder(folder: str, labels: int) -> RobertaForSequenceClassification:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the head, which every federation draws anew
        return RobertaForSequenceClassification.from_pretrained(folder, num_labels=labels).eval()


# Its data: {"text": "w1 w4", "label": "sport"}, in a file for each split in a folder for each client


def load(config: TaskConfig, seed: int) -> TaskData:
    clients = {}
    for folder in sorted(Path(str(config.path)).iterdir()):
        train, test = (
            tuple(Example(row["text"], (row["label"],)) for row in map(json.loads, (folder / f"{split}.jsonl").open()))
            for split in ("train", "test")
        )
        clients[folder.name] = ClientData(folder.name, train, test=test)
    return TaskData("sentences", "accuracy", clients, LABELS)


TASK = Task(load, metric="accuracy", clients="as in the folder", source="synthetic")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> SimpleNamespace:
    """A folder of data and one with a random base; the three clients have few sentences of one label each."""
    place = tmp_path_factory.mktemp("sentences")
    base = classifiers.written(place / "base", "roberta", kind="RobertaForSequenceClassification", num_labels=3)
    return SimpleNamespace(base=base, data=classifiers.federation(place / "data"))


def tree(written: SimpleNamespace, method: str = "fedit", **changes: Any) -> dict[str, Any]:
    kind, task = NAMES
    return {
        "seed": 0,
        "rounds": 4,
        "base": {"name": str(written.base), "kind": kind, "dtype": "float32"},
        "adapter": {"rank": 2, "alpha": 4, "dropout": 0.1, "target_modules": ["query", "value"]},
        "task": {"name": task, "path": str(written.data), "validation": 0.2},
        "method": {"name": method},
        "local": {"steps": 6, "batch_size": 6, "lr": 0.02, "lr_end": 0.02},
        "eval": {"every": 1},
        "device": "cpu",
        **changes,
    }


@pytest.fixture(scope="module")
def trained(written, tmp_path_factory) -> Path:
    """Runs of three methods, each in a folder of its name."""
    place = tmp_path_factory.mktemp("runs")
    for method in ("fedit", "local", "fedmerge"):
        experiment.train(from_dict(tree(written, method)), place / method)
    return place


@pytest.mark.parametrize("method", ["fedit", "local", "fedmerge"])
def test_it_trains_and_scores(trained, method):
    classifiers.check_learned(trained / method)
    assert len([*(trained / method / "adapters").rglob("adapter_model.safetensors")]) == 3


def test_exports_load_here_and_in_stock_peft(written, trained):
    folder = trained / "local/adapters/bob"
    text = (folder / "README.md").read_text()
    assert "A personal LoRA adapter and head of `" in text and "pipeline_tag: text-classification" in text
    client = llm_fed.load_client(folder, str(written.base), labels=len(LABELS), kind=NAMES[0])
    sentences = [" ".join(f"w{10 * label + n}" for n in range(4)) for label in range(3)]
    found = client.classify(sentences)
    stock = PeftModel.from_pretrained(encoder(str(written.base), len(LABELS)), folder)
    inputs = client.base.tokenizer(sentences, return_tensors="pt")
    with torch.no_grad():
        logits = stock(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits
    assert found.tolist() == logits.argmax(-1).tolist()
    asked = Logits("", client.structure, client.state, client.base.classified(sentences))
    (own,) = Engine(client.base).execute([asked])
    torch.testing.assert_close(own, logits, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="this is a sentence classifier"):
        client.generate(["w1 w2"])


def test_an_opened_run_knows_its_kind(trained):
    with pytest.raises(plugins.NotAllowed, match="base.kind='test_another_kind:Sentences'"):
        llm_fed.open_run(trained / "local").model("ada")
    model = llm_fed.open_run(trained / "local", allow=NAMES).model("ada")
    assert isinstance(model.base, Sentences) and model.classify(["w1 w2 w3"]).shape == (1,)


def test_it_is_audited(trained):
    with plugins.allowing(NAMES):
        found = audit(trained / "fedmerge", every=True)
    assert found.checked and not found.findings


def test_a_network_gives_the_same_numbers(written, trained, tmp_path):
    """Each client at a node of its own, whose operator allows the code of this file."""
    settings = tree(written, network=NETWORK)
    link = NetworkInProcess(tmp_path, written, settings)
    link.places = {node: replace(place, allow=NAMES) for node, place in link.places.items()}
    there = server.train(link.config, tmp_path / "run", link)
    assert there["scores"]["clients"] == classifiers.summary(trained / "fedit")["scores"]["clients"]
    before, after = (
        [line["loss"] for line in read_records(folder / "metrics.jsonl") if line["kind"] == "round"]
        for folder in (trained / "fedit", tmp_path / "run")
    )
    assert before == pytest.approx(after, rel=1e-4)
