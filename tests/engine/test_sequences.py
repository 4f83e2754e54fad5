"""Sequence classification: fused training equals training alone and PEFT, whatever the architecture."""

import logging
import warnings
from typing import Any

import classifiers
import every
import peft
import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification
from transformers.utils import logging as transformers_logging

from llm_fed.engine.engine import Engine
from llm_fed.kinds.sequences import load_sequences
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Features, Fit, Logits
from llm_fed.models.architectures import longest
from llm_fed.settings.config import NUMBER
from llm_fed.settings.configfile import from_dict
from llm_fed.tasks.common import Example, TaskData


@pytest.fixture(scope="module", params=every.quick(classifiers.BASES, ["bert", "deberta-v3", "modernbert", "llama"]))
def folder(request, tmp_path_factory):
    return classifiers.written(tmp_path_factory.mktemp("base") / request.param, request.param)


def loaded(folder, labels: tuple[str, ...] = classifiers.LABELS) -> Any:
    config = from_dict({"base": {"name": str(folder), "dtype": "float32"}})
    base = load_sequences(config, TaskData("", "", {}, labels), "cpu")
    base.model.double()
    return base


def examples(client: int, size: int, numbers: bool = False, pairs: bool = True) -> list[Example]:
    made = classifiers.rows(client, size, pairs=pairs and not numbers, numbers=numbers)
    if numbers:
        return [Example(row["text"], (str(row["score"]),)) for row in made]
    return [
        Example(row.get("sentence1", row.get("text")), (row["label"],), pair=row.get("sentence2", "")) for row in made
    ]


def jobs(base: Any, adapter: Any, numbers: bool = False) -> list[Fit]:
    found = []
    for client in range(3):
        encoded = base.encode(examples(client, 12, numbers))
        batches = [encoded[3 * step : 3 * step + 1 + client] for step in range(4)]
        start = base.draw(base.structure(adapter), torch.Generator().manual_seed(client))
        found.append(tiny.fit_on(f"c{client}", base.structure(adapter), start, batches, Optimizer(0.01), seed=client))
    return found


ADAPTER = from_dict({"adapter": {"rank": 3, "alpha": 5, "dropout": 0.1}}).adapter
WITHOUT_DROPOUT = from_dict({"adapter": {"rank": 3, "alpha": 5, "dropout": 0.0}}).adapter


@pytest.mark.parametrize("numbers", [False, True], ids=["labels", "numbers"])
def test_fused_is_alone(folder, numbers):
    """Texts of several lengths share micro-batches, and each client gets what it would get by itself."""
    base = loaded(folder, (NUMBER,) if numbers else classifiers.LABELS)
    work = jobs(base, ADAPTER, numbers)
    for job, fused in zip(work, Engine(base).execute(work), strict=True):
        (alone,) = Engine(base).execute([job])
        assert float((alone.state.row - fused.state.row).abs().max()) < 1e-10
        assert float((job.start.row - alone.state.row).abs().max()) > 1e-3


def test_adapters_are_on_the_architectures_own_layers(folder):
    base = loaded(folder)
    assert base.structure(ADAPTER).target_modules == classifiers.BASES[folder.name][2]


@pytest.mark.parametrize("numbers", [False, True], ids=["labels", "numbers"])
def test_training_is_that_of_peft(folder, numbers, tmp_path):
    """Two steps of SGD without dropout, by PEFT and autograd on one text after another."""
    base = loaded(folder, (NUMBER,) if numbers else classifiers.LABELS)
    (_, _, job) = jobs(base, WITHOUT_DROPOUT, numbers)
    job = tiny.fit_on("c", job.structure, job.start, [list(b) for b in map(job.batch, range(2))], Optimizer(0.1, "sgd"))
    (fitted,) = Engine(base).execute([job])
    stock = stock_model(folder, base, job.structure)
    parameters = {name: parameter for name, parameter in stock.named_parameters() if parameter.requires_grad}
    assert len(parameters) == len(job.start.layout.names)
    with torch.no_grad():
        for name, value in job.start.tensors().items():
            stock.get_parameter(peft_name(name)).copy_(value)
    for step in range(2):
        stock.zero_grad()
        for sentence in job.batch(step):
            inputs = {"input_ids": torch.tensor([sentence.input_ids])}
            if sentence.types:
                inputs["token_type_ids"] = torch.tensor([sentence.types])
            logits = stock(**inputs).logits
            right = torch.tensor([sentence.label], dtype=torch.float64 if numbers else torch.int64)
            loss = (
                (logits[:, 0] - right).square().mean() if numbers else torch.nn.functional.cross_entropy(logits, right)
            )
            (loss / len(job.batch(step))).backward()
        with torch.no_grad():
            for parameter in parameters.values():
                parameter -= 0.1 * parameter.grad
    for name, value in fitted.state.tensors().items():
        torch.testing.assert_close(stock.get_parameter(peft_name(name)), value, rtol=0, atol=1e-9)


def stock_model(folder, base: Any, structure: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=len(base.labels), pad_token_id=base.tokenizer.pad_token_id
        )
        stock = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=structure.rank, lora_alpha=structure.alpha, target_modules=list(structure.target_modules),
                modules_to_save=list(structure.whole),
            ),
        )  # fmt: skip
    return stock.double().eval()


def peft_name(entry: str) -> str:
    if entry.endswith((".lora_A", ".lora_B")):
        return f"base_model.model.{entry}.default.weight"
    module, _, last = entry.rpartition(".")
    return f"base_model.model.{module}.modules_to_save.default.{last}"


def test_features_are_what_the_head_reads(folder):
    """Of a decoder those at the last token: the head gives the logits from them."""
    base = loaded(folder)
    encoded = base.encode(examples(1, 7, pairs=False))
    structure = base.structure(WITHOUT_DROPOUT)
    (features,) = Engine(base).execute([Features("", structure, encoded)])
    state = base.draw(structure, torch.Generator().manual_seed(0))
    for name, value in state.tensors().items():  # the model's own layers, and an adapter that adds nothing
        if not name.endswith((".lora_A", ".lora_B")):
            value.copy_(base.model.get_parameter(name))
    (logits,) = Engine(base).execute([Logits("", structure, state, encoded)])
    head = base.model.get_submodule(base.head)
    with torch.no_grad():
        torch.testing.assert_close(head(features), logits, rtol=0, atol=1e-10)


def test_private_steps_clip_each_text(folder):
    """Gradients of single examples, as a clipped step takes them, add up to the gradient of all."""
    from stock_training import per_example_gradients

    base = loaded(folder)
    encoded, structure = base.encode(examples(0, 5)), base.structure(WITHOUT_DROPOUT)
    state = base.draw(structure, torch.Generator().manual_seed(0))
    model = Engine(base).adapted(structure)
    together = per_example_gradients(model, state, encoded)
    for place, example in enumerate(encoded):
        alone = per_example_gradients(model, state, [example])
        torch.testing.assert_close(alone[0], together[place], rtol=0, atol=1e-10)


def test_a_new_head_is_no_news(tmp_path, caplog):
    """transformers would report it as missing, though an adapter may bring it."""
    folder = classifiers.written(tmp_path / "roberta", "roberta")
    library, before = transformers_logging.get_logger("transformers"), transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    library.addHandler(caplog.handler)
    try:
        loaded(folder)
        assert "MISSING" not in caplog.text and transformers_logging.get_verbosity() == logging.WARNING
        AutoModelForSequenceClassification.from_pretrained(folder)
        assert "MISSING" in caplog.text
    finally:
        library.removeHandler(caplog.handler)
        transformers_logging.set_verbosity(before)


def test_a_length_that_a_tokenizer_has_as_a_float():
    tokenizer = classifiers.tokenizer()
    tokenizer.model_max_length = 20.0  # type: ignore[assignment]
    most = longest(BertForSequenceClassification(BertConfig(hidden_size=12, vocab_size=40)), tokenizer)
    assert most == 20 and isinstance(most, int)
