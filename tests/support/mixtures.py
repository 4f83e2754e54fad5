"""Small mixtures of experts with random weights."""

from typing import Any

import torch
import transformers as hf
from torch import nn

from llm_fed.models.lora import draw
from llm_fed.testing.tiny import HEADS, drawn

_SIZES = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PROMPTS = [(0, [5, 6, 7, 8]), (1, [9, 10]), (1, [11, 12, 13, 14, 15, 16])]  # of clients


def config(kind: type, **changes: Any) -> Any:
    return kind(**{**HEADS, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2, **changes})


FAMILIES = {
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        config(hf.Qwen2MoeConfig, **_SIZES, shared_expert_intermediate_size=16)
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(config(hf.Qwen3MoeConfig, **_SIZES, head_dim=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(config(hf.MixtralConfig, **_SIZES, head_dim=8, sliding_window=4)),
    "olmoe": lambda: hf.OlmoeForCausalLM(config(hf.OlmoeConfig, **_SIZES)),
}


def gpt_oss() -> Any:
    """Its weights are transposed, its experts have biases, and their gates stand between the other columns."""
    return hf.GptOssForCausalLM(config(hf.GptOssConfig, num_local_experts=4, num_experts_per_tok=2, head_dim=8))


def build(family: str, dtype: torch.dtype) -> Any:
    model = drawn(gpt_oss if family == "gpt_oss" else FAMILIES[family], 0)
    model.set_experts_implementation("eager")  # the others know no float64
    return nn.Module.to(model, dtype).eval()


def states(model: Any, structure: Any, dtype: torch.dtype) -> list[Any]:
    """Of two clients, without a zero in them."""
    made = []
    for k in range(2):
        draws = torch.Generator().manual_seed(k)
        fresh = draw(model, structure, draws, dtype)
        made.append(fresh.like(fresh.row + 0.05 * torch.randn(fresh.row.shape, generator=draws, dtype=dtype)))
    return made
