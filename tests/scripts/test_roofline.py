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
from llm_fed.engine.fit import token_losses
from llm_fed.tasks.common import Encoded


@pytest.fixture(scope="module")
def roofline() -> Any:
    folder = str(Path(__file__).parents[2] / "scripts" / "bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("roofline")


@pytest.mark.parametrize("name", ["3B", "8B"])
def test_products_are_those_that_torch_counts(roofline, name):
    """Of two examples of 320 tokens each, on a device that computes nothing. Torch counts all of attention, of which the
    causal half is needed, and the first layer's inputs need no gradient."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**roofline.SHAPES[name]))
    example = Encoded([7] * 320, [n >= 256 for n in range(320)])
    batch, bank = TEXT.collate([example] * 2), AdapterBank(model, roofline.LORA, 2)
    with FlopCounterMode(display=False) as counted, bank.attached(torch.arange(2)):
        token_losses(model, batch).sum().backward()
    predicted = roofline.Shape(model, 16, None).work([320, 320]).flops
    assert predicted == pytest.approx(counted.get_total_flops(), rel=0.05)
