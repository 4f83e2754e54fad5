"""Builders of tiny random models, one per shape that the project supports, and of random examples; nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from llm_fed.tasks.common import Encoded

VOCABULARY = 61
HEADS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # far from linear, so that every part of the model matters
}
TARGETS = {  # module names that LoRA usually adapts
    "llama": ("q_proj", "v_proj", "down_proj"),
    "qwen3": ("q_proj", "v_proj", "up_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "vit": ("q_proj", "v_proj"),
}


def build(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> PreTrainedModel:
    """A random model of `kind` (llama, qwen3, gpt2, vit); its own dropout is as its authors configured it."""
    makers = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**{**HEADS, "tie_word_embeddings": True, **changes})),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**HEADS, "head_dim": 8, **changes})),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=64, **changes)
        ),
        "vit": lambda: ViTForImageClassification(
            ViTConfig(
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=40,
                image_size=16,
                patch_size=8,
                num_labels=5,
                **changes,
            )
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return makers[kind]().to(dtype).eval()


def examples(seed: int, lengths: list[int]) -> list[Encoded]:
    """Random sequences of the given lengths; about the last third of each counts in the loss."""
    draws = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(1, VOCABULARY, (length,), generator=draws).tolist()
        prompt = max(1, 2 * length // 3)
        made.append(Encoded(ids, [False] * prompt + [True] * (length - prompt)))
    return made
