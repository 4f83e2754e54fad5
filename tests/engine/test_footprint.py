"""What a training step is said to hold, beside what is alive when it is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bitsandbytes as bnb
import every
import mixtures
import pytest
import tiny
import tiny_images
import torch
from meter import Meter
from torch import nn

from llm_fed.basics.rng import Secret, generator
from llm_fed.engine import capture
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.capture import USES, Captures, Graphs
from llm_fed.engine.end_to_end import attention, flattened
from llm_fed.engine.fit import fit
from llm_fed.engine.footprint import INPUTS, activations, cache
from llm_fed.engine.memory import activation_checkpointing
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.engine.tokens import groups_of
from llm_fed.method.client import Client, Private
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.method.site import Data
from llm_fed.models.lora import Lora, draw
from llm_fed.models.structure import Full
from llm_fed.settings.config import LocalConfig
from llm_fed.tasks.common import Encoded
from llm_fed.testing.tiny import language_base, llama

TEXT = [Encoded([1 + n % 50 for n in range(40)], [n >= 30 for n in range(40)])] * 3
LORA = Lora(2, 4, 0.0, ("q_proj", "v_proj"))
WIDE = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_key_value_heads": 1}
ONE = {"num_hidden_layers": 1}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def quantised() -> Any:
    """A base whose linear layers hold 4 bits."""
    model = llama(**WIDE | ONE).to(torch.bfloat16).requires_grad_(False)
    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, nn.Linear):
            packed = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            packed.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            model.model.layers.set_submodule(name, packed.to("cpu"))
    return model


def mixture() -> Any:
    """A base whose products by expert are grouped, as transformers loads it."""
    model = mixtures.build("qwen3_moe", torch.float32)
    model.set_experts_implementation("grouped_mm")
    return language_base(model)


def padded() -> Any:
    """A base that looks for padding among its tokens, as one without values cannot."""
    model = tiny.build("gpt2")
    model.config.pad_token_id = 0
    return language_base(model)


CASES: dict[str, tuple[Any, Any]] = {
    "llama": (lambda: language_base(llama()), LORA),
    "dropout": (lambda: language_base(llama(**WIDE | ONE)), Lora(8, 4, 0.1, "all-linear")),
    "autocast": (lambda: language_base(llama(**WIDE | ONE), autocast=torch.bfloat16), LORA),
    "router": (lambda: language_base(llama()), LORA.with_experts("a", "b", gate="router")),
    "mix": (lambda: language_base(llama()), LORA.with_experts("a", "b", gate="mix")),
    "head": (lambda: language_base(llama()), Lora(2, 4, 0.0, ("q_proj", "lm_head"))),
    "qwen3": (lambda: language_base(tiny.build("qwen3")), LORA),
    "gpt2": (lambda: language_base(tiny.build("gpt2")), Lora(2, 4, 0.0, ("c_attn",))),
    "mixture": (mixture, LORA),
    "experts": (mixture, replace(LORA, parameters=("experts.down_proj",))),
    "gpt2 with a pad token": (padded, Lora(2, 4, 0.0, ("c_attn",))),
    "nf4": (lambda: language_base(quantised(), autocast=torch.bfloat16), LORA),
    "dynamic": (lambda: language_base(llama(rope_parameters=DYNAMIC)), LORA),
    "windows": (lambda: language_base(tiny.build("mistral", sliding_window=8)), LORA),
    "pictures": (lambda: tiny_images.vit(torch.float32), tiny_images.LORA),
}


def site_of(structure: Any, train: Any, **more: Any) -> Client:
    return Client("a", structure, LocalConfig(), 0, lambda generator: None, Data(train), **more)  # type: ignore[arg-type]


def alive(base: Any, structure: Any, train: Any, private: bool = False) -> int:
    """The most bytes that a real step holds."""
    its, rows = base.examples(structure), len(train)
    bank, batch = AdapterBank(base.model, structure, 1), its.collate(train)
    with Meter() as meter:
        masks = bank.draw_masks([0] * rows, [its.length(example) for example in train])
        mix = torch.ones(rows, len(structure.experts)) if structure.gate == "mix" else None
        each = bank.rows.new_zeros(rows, bank.layout.size) if private else None
        with (
            bank.attached(torch.zeros(rows, dtype=torch.int64), masks, mix, each=each),
            activation_checkpointing(base.model),
        ):
            with base.computing():
                loss = its.losses(base.model, batch, all_rows=bank.adapts_head).sum()
            loss.backward()
    return meter.peak


PLANNED = "experts", "gpt2 with a pad token"  # what could not be planned once


@pytest.mark.parametrize(
    "case", every.quick(CASES, ["llama", "dropout", "mix", "gpt2", "nf4", "dynamic", "pictures", *PLANNED])
)
def test_what_is_said_is_what_is_alive(case):
    make, structure = CASES[case]
    base = make()
    train = tiny_images.pictures(3) if case == "pictures" else TEXT
    said = activations(base, site_of(structure, train), LocalConfig(batch_size=3), per_pass=1)
    assert said.largest == pytest.approx(alive(base, structure, train), rel=0.1)
    assert said.smallest == pytest.approx(alive(base, structure, train[:1]), rel=0.1)
    assert said.token == pytest.approx(
        (said.largest - said.smallest) / (2 * base.examples(structure).length(train[0])), abs=1
    )
    assert all(parameter.grad is None for parameter in base.model.parameters())


@pytest.mark.parametrize(
    "case",
    every.quick(["llama", "dropout", "autocast", "router", "mix", "qwen3", "gpt2", "windows"], ["dropout", "windows"]),
)
def test_what_is_said_of_texts_end_to_end_is_what_is_alive(case):
    """Of three texts of each of two clients."""
    make, structure = CASES[case]
    base = make()
    said = activations(base, site_of(structure, TEXT), LocalConfig(batch_size=3), per_pass=2, end_to_end=True)
    sizes = [40] * 6  # the plan fills a micro-batch with as many as all clients have at once
    bank, batch = AdapterBank(base.model, structure, 1), flattened(TEXT * 2)
    _, groups = groups_of([0] * 3 + [1] * 3, sizes)
    with Meter() as meter, attention(base.model):
        masks = bank.draw_masks([0] * 6, sizes, end_to_end=True)
        mix = torch.ones(sum(sizes), len(structure.experts)) if structure.gate == "mix" else None
        with bank.attached(torch.zeros(2, dtype=torch.int64), masks, mix, groups=groups):
            with base.computing():
                loss = base.examples(structure).losses(base.model, batch, all_rows=bank.adapts_head).sum()
            loss.backward()
    assert 0.9 * meter.peak < said.largest < 1.1 * meter.peak
    rows = activations(base, site_of(structure, TEXT), LocalConfig(batch_size=3), per_pass=2)
    assert said.largest < 1.1 * rows.largest


@pytest.mark.parametrize(
    ("case", "flat", "keyed"),
    every.quick(
        [("dropout", False, False), ("autocast", True, False), ("dropout", True, True)],
        [("autocast", True, False), ("dropout", True, True)],
    ),
)
def test_what_captured_passes_are_said_to_keep_is_what_they_keep(case, flat, keyed, monkeypatch):
    """Graphs share what the largest of them holds at the most; inputs and dropout masks lie beside it. Of three texts
    of each of two clients, in shapes that are wider than they are, and of a smaller one."""
    make, structure = CASES[case]
    base, held = make(), [0]

    class Pool(Graphs):
        def capture(self, run):
            with Meter() as meter:
                run()
            held.append(meter.peak)
            return run

    monkeypatch.setattr(capture, "Graphs", Pool)
    text = [Encoded([1 + n % 50 for n in range(43)], [n >= 30 for n in range(43)])] * 3
    asked = {"end_to_end": flat, "captured": True, "keyed_masks": keyed}
    said = activations(base, site_of(structure, text), LocalConfig(batch_size=3), per_pass=2, **asked)
    captures = Captures()
    model = AdaptedModel(
        base.model, structure, base.examples(structure), base.autocast, captures=captures, packing=(4096, 0),
        padding_free=PaddingFree() if flat else None, keyed_masks=keyed,
    )  # fmt: skip
    start = draw(base.model, structure, generator(0))
    batches = [text] * (USES + 1) + [text[:1]] * (USES + 1)
    fit(model, [Fit.on(f"{k}", structure, start, batches, Optimizer(0.01)) for k in range(2)])
    (stage,) = captures._stages.values()
    assert len(stage._slots) == len(held) - 1 == 2
    inputs = max(slot.static._memory.nbytes for slot in stage._slots.values())
    assert said.graphs == pytest.approx(max(held) + inputs + stage._masks.nbytes, rel=0.1)
    alone = activations(
        base, site_of(structure, text), LocalConfig(batch_size=3), per_pass=2, **asked | {"captured": False}
    )
    assert said.largest == alone.largest and alone.graphs == 0 < inputs < INPUTS * 6 * 48


def test_gradients_of_single_examples_and_recomputed_activations_count():
    base = language_base(llama(**WIDE | {"num_hidden_layers": 2}))
    plain = activations(base, site_of(LORA, TEXT), LocalConfig(batch_size=3), 1)
    private = site_of(LORA, TEXT, private=Private(1.0, 1.0, Secret.fresh()))
    said = activations(base, private, LocalConfig(batch_size=3), 1)
    assert (
        said.largest == pytest.approx(alive(base, LORA, TEXT, private=True), rel=0.1) and said.largest > plain.largest
    )
    base.model.gradient_checkpointing_enable()
    less = activations(base, site_of(LORA, TEXT), LocalConfig(batch_size=3), 1)
    assert less.largest == pytest.approx(alive(base, LORA, TEXT), rel=0.1) and less.largest < plain.largest


def test_whole_models():
    """A batch of whole models is not divided; the model itself stays as it was."""
    base = tiny_images.resnet(torch.float32)
    pictures, before = tiny_images.pictures(4), {n: t.clone() for n, t in base.model.state_dict().items()}
    said = activations(base, site_of(Full(), pictures), LocalConfig(batch_size=4), per_pass=3)
    flat, its = base.flat(Full()), base.examples(Full())
    flat.module.train()
    with Meter() as meter:
        batch = its.collate(pictures)
        loss = torch.nn.functional.cross_entropy(its.answer(flat.module, batch).logits, batch.labels)
        torch.autograd.grad(loss, list(flat.parameters.values()))
    assert said.largest == said.smallest == pytest.approx(meter.peak, rel=0.1) and said.token is None
    assert all(torch.equal(value, before[name]) for name, value in base.model.state_dict().items())


def test_what_an_answer_keeps_for_each_token():
    """Keys and values of 2 heads of 6 numbers in 2 layers, in 4 bytes; in bfloat16 half of it."""
    base = language_base(llama())
    assert cache(base) == 2 * 2 * (2 * 6) * 4
    assert cache(replace(base, model=llama().bfloat16(), dtype=torch.bfloat16)) == 2 * 2 * (2 * 6) * 2
