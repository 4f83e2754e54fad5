"""What `scripts/bench/roofline.py` counts, beside what torch counts; and what it prints."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import TEXT
from llm_fed.tasks.common import Encoded


@pytest.fixture(scope="module")
def roofline() -> Any:
    folder = str(Path(__file__).parents[2] / "scripts" / "bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("roofline")


LENGTH, ROWS = 320, 2
SIZES = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 12, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 500}  # fmt: skip


def test_products_are_those_that_torch_counts(roofline):
    """Torch counts attention where it is written out, with the upper half of its matrices: 4 T q for each token and
    layer in the forward pass, and twice as much in the backward pass, where fused and causal it is 2 T q and 5 T q.
    Besides, it does not count the gradient of the first layer's inputs, which nobody asks for."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    predicted = roofline.Shape(model, 16, None).work([LENGTH] * ROWS).flops
    model.set_attn_implementation("eager")
    example = Encoded([7] * LENGTH, [n >= LENGTH - LENGTH // 5 for n in range(LENGTH)])
    batch, bank = TEXT.collate([example] * ROWS), AdapterBank(model, roofline.LORA, ROWS)
    with FlopCounterMode(display=False) as counted, bank.attached(torch.arange(ROWS)):
        TEXT.losses(model, batch).sum().backward()
    attention = LENGTH * 64 * 12 * ROWS * LENGTH  # T q, of all layers and tokens
    assert predicted + (12 - 7) * attention == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_weights_are_read_twice_and_what_is_kept_is_written_and_read(roofline):
    """Of 12 layers: q and o 64 x 64, k and v 64 x 32, three of 64 x 172; the head 64 x 500. Packed weights are read in
    half a byte and written in two, in both passes."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    plain, packed = (roofline.Shape(model, bits, torch.bfloat16) for bits in (16, 4))
    inner = 12 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172)
    kept = plain.kept.bytes(1, 40, 8)
    assert plain.work([40]).bytes == 2 * 2 * (inner + 64 * 500) + 2 * kept
    assert plain.work([40]).unpacking == 0 and packed.work([40]).unpacking == 2 * 2.5 * inner
    assert plain.base - packed.base == pytest.approx(inner * (2 - 0.5 - 1 / 64 - 1 / 4096))


def test_the_longest_part_counts(roofline):
    """On a card of 1 TFLOP/s and 1 GB/s, at 1 us per launch."""
    card = roofline.Card(1e12, 1e9, 1e9)
    parts = [(2e9, 0, 0, 0, 0.002), (0, 3e6, 0, 0, 0.003), (0, 0, 0, 4000, 0.004), (2e9, 0, 1e6, 0, 0.003)]
    for flops, size, unpacking, launches, seconds in parts:
        assert roofline.Work(flops, size, unpacking, launches).seconds(card, 1e-6) == pytest.approx(seconds)


def test_what_does_not_fit_is_divided_and_said(roofline):
    shape = roofline.Shape(LlamaForCausalLM(LlamaConfig(**SIZES)), 16, torch.bfloat16)
    lengths = roofline.drawn(8)
    two = shape.memory(8, 2, max(lengths)) / 0.9  # enough for two of the longest at once
    enough, little, none = (roofline.Card(1e12, 1e12, memory) for memory in (1e12, two, 1e6))
    assert len(roofline.planned(shape, enough, lengths, 8)) < len(roofline.planned(shape, little, lengths, 8))
    assert roofline.cell(shape, none, lengths, 8) == "does not fit"


def test_the_table_of_the_page(roofline, capsys):
    """docs/results/log/roofline.md has what the command prints."""
    roofline.table()
    page = (Path(__file__).parents[2] / "docs/results/log/roofline.md").read_text()
    assert capsys.readouterr().out in page
