"""The memory that `formula` predicts, beside what is alive when small models of several shapes are trained."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import every
import pytest
import tiny
import torch
from meter import Meter
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import TEXT
from llm_fed.engine.footprint import weights
from llm_fed.engine.memory import activation_checkpointing
from llm_fed.models.lora import Lora
from llm_fed.tasks.common import Encoded
from llm_fed.testing.tiny import HEADS, llama

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))
import formula  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "narrow": {},
    "wide": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_key_value_heads": 1},
}
BUILD = {
    "llama": llama,
    "mistral": lambda **changes: MistralForCausalLM(MistralConfig(**{**HEADS, **changes})),
    "qwen2": lambda **changes: Qwen2ForCausalLM(Qwen2Config(**{**HEADS, **changes})),
    "qwen3": lambda **changes: Qwen3ForCausalLM(Qwen3Config(**{**HEADS, "head_dim": 12, **changes})),
}
ROWS, LENGTH, TARGETS = 3, 40, 10  # targets of each row


def measured(model: Any, structure: Lora, autocast: torch.dtype | None) -> tuple[int, int]:
    """Bytes that are alive between forward and backward pass of a micro-batch, and the most in the backward pass."""
    bank = AdapterBank(model, structure, ROWS)
    example = Encoded([1 + n for n in range(LENGTH)], [n >= LENGTH - TARGETS for n in range(LENGTH)])
    batch = TEXT.collate([example] * ROWS)
    with Meter() as meter:
        masks = bank.draw_masks([0] * ROWS, [LENGTH] * ROWS)
        with bank.attached(torch.arange(ROWS), masks), activation_checkpointing(model):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = TEXT.losses_of(TEXT.logits(model, batch), batch).sum()  # as a GPU has it
            gc.collect()
            kept, meter.peak = meter.alive(), 0
            loss.backward()
    return kept, meter.peak


@pytest.mark.parametrize("checkpointing", every.quick([False, True], [False]))
@pytest.mark.parametrize(
    ("kind", "shape", "rank", "dropout", "targets", "autocast"),
    [
        ("llama", "narrow", 2, 0.0, ("q_proj", "v_proj"), None),
        ("llama", "wide", 8, 0.1, "all-linear", torch.bfloat16),
        ("llama", "wide", 2, 0.0, r".*layers\.1\..*(o_proj|down_proj)", None),  # the first layer needs no backward pass
        ("qwen3", "wide", 2, 0.0, "all-linear", None),
        ("qwen3", "narrow", 8, 0.1, ("k_proj", "gate_proj"), torch.bfloat16),
        ("qwen2", "wide", 8, 0.0, ("q_proj", "v_proj"), torch.bfloat16),
        ("mistral", "narrow", 2, 0.1, ("o_proj", "up_proj"), None),
    ],
)
def test_bytes_are_those_that_are_alive(kind, shape, rank, dropout, targets, autocast, checkpointing):
    model = BUILD[kind](**SHAPES[shape]).to(autocast or torch.float32).eval()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    structure = Lora(rank, 4, dropout, targets)
    predicted = formula.kept(model, structure, autocast, checkpointing)
    kept, peak = measured(model, structure, autocast)
    assert predicted.bytes(ROWS, LENGTH, ROWS * TARGETS) == pytest.approx(kept, rel=0.01)
    assert predicted.peak(ROWS, LENGTH, ROWS * TARGETS) == pytest.approx(peak, rel=0.15)


def quantised() -> Any:
    """Every linear layer of the blocks of a LLaMA in 4 bits, with double quantisation."""
    model = llama(**SHAPES["wide"], tie_word_embeddings=False).eval()
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                layer = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False, quant_type="nf4",
                                          compute_dtype=torch.bfloat16, compress_statistics=True)  # fmt: skip
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer.to("cpu"))
            else:
                child.to(torch.bfloat16)
    model.lm_head.to(torch.bfloat16)
    return model


def test_a_base_in_four_bits():
    """Weights: half a byte of each, and for each layer its scales (a byte for 64 weights, four bytes for 256 of these),
    their mean, and the codes of both, 16 and 256 numbers; embeddings and head in two bytes, norms too."""
    model, structure = quantised(), Lora(2, 4, 0.0, ("q_proj", "v_proj"))
    predicted = formula.kept(model, structure, torch.bfloat16, False)
    kept, peak = measured(model, structure, torch.bfloat16)
    assert predicted.bytes(ROWS, LENGTH, ROWS * TARGETS) == pytest.approx(kept, rel=0.01)
    assert predicted.peak(ROWS, LENGTH, ROWS * TARGETS) == pytest.approx(peak, rel=0.15)
    sizes = [64 * 64, 64 * 16, 64 * 16, 64 * 64, *[64 * 176] * 3] * 3
    scales = [-(-size // 64) for size in sizes]
    constants = sum(n + 4 * -(-n // 256) + 4 for n in scales) + len(sizes) * 4 * (16 + 256)
    others = 2 * (2 * 61 * 64 + 7 * 64)
    assert weights([model]) == pytest.approx(sum(sizes) / 2 + constants + others, rel=0.02)


def test_a_model_without_weights_will_do():
    structure = Lora(2, 4, 0.0, ("q_proj", "v_proj"))
    with torch.device("meta"):
        there = formula.kept(llama(), structure, torch.bfloat16, False)
    assert there == formula.kept(llama(), structure, torch.bfloat16, False) is not None


def test_what_an_answer_keeps_for_each_token():
    """Keys and values of 2 heads of 6 numbers in 2 layers, in 2 bytes."""
    assert formula.cache(llama(), 2) == 2 * 2 * (2 * 6) * 2


@pytest.mark.parametrize("reason", ["family", "attention", "experts", "beneath", "head"])
def test_where_it_does_not_hold_nothing_is_predicted(reason):
    model = tiny.build("gpt2") if reason == "family" else llama()
    structure = Lora(2, 4, 0.0, "all-linear")
    if reason == "attention":
        model.set_attn_implementation("eager")
    if reason == "experts":
        structure = structure.with_experts("a", "b", gate="sum")
    if reason == "beneath":
        structure = Lora(2, 4, 0.0, "all-linear", delta=True)
    if reason == "head":
        structure = Lora(2, 4, 0.0, ("q_proj", "lm_head"))
    assert formula.kept(model, structure, None, False) is None
