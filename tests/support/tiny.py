"""Tiny random models of every shape the project supports, inputs for them, and stock PEFT around them."""

import copy
from contextlib import AbstractContextManager

import peft
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from llm_fed.method.requests import Fit
from llm_fed.models.lora import Lora
from llm_fed.state import State
from llm_fed.tasks.common import Encoded
from llm_fed.testing.tiny import HEADS, VOCABULARY, drawn, llama

TARGETS = {  # module names that LoRA usually adapts
    "llama": ("q_proj", "v_proj", "down_proj"),
    "qwen3": ("q_proj", "v_proj", "up_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "o_proj"),
    "gpt2": ("c_attn", "c_proj"),
}


def structure_of(kind: str, dropout: float = 0.0) -> Lora:
    return Lora(rank=3, alpha=5, dropout=dropout, target_modules=TARGETS[kind])


def fit_on(site: str, structure, start: State, batches, optimizer, **options) -> Fit:
    """A fit on these examples, a list of them for each step."""
    indices = iter(range(sum(map(len, batches))))
    of_steps, examples = [[next(indices) for _ in batch] for batch in batches], [each for b in batches for each in b]
    return Fit(site, structure, start, examples, of_steps, optimizer, **options)


def build(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> PreTrainedModel:
    """A random model of `kind` (a key of TARGETS, or vit); its own dropout is as its authors configured it."""
    makers = {
        "llama": lambda: llama(**changes),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**HEADS, "head_dim": 8, **changes})),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**HEADS, **changes})),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**{**HEADS, "sliding_window": None, **changes})),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=64, **changes)
        ),
        "vit": lambda: ViTForImageClassification(ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, image_size=16,
            patch_size=8, num_labels=5, **changes,  # type: ignore[call-arg]
        )),
    }  # fmt: skip
    model: PreTrainedModel = drawn(makers[kind], seed)
    nn.Module.to(model, dtype)
    return model.eval()


def examples(seed: int, lengths: list[int]) -> list[Encoded]:
    """Random sequences of the given lengths; about the last third of each counts in the loss."""
    draws = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(1, VOCABULARY, (length,), generator=draws).tolist()
        prompt = max(1, 2 * length // 3)
        made.append(Encoded(ids, [False] * prompt + [True] * (length - prompt)))
    return made


def inputs(kind: str, rows: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A random batch that the model of `kind` accepts: 7 tokens per row, or an image of 16 x 16."""
    draws = torch.Generator().manual_seed(0)
    if kind == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, dtype=dtype, generator=draws)}
    return {"input_ids": torch.randint(1, VOCABULARY, (rows, 7), generator=draws)}


def stock_peft(model: PreTrainedModel, structure: Lora, state: State, **options) -> peft.PeftModel:
    """A PEFT model around a copy of `model`, with the adapter `state`."""
    names = structure.target_modules
    config = peft.LoraConfig(
        r=structure.rank,
        lora_alpha=structure.alpha,  # type: ignore[arg-type]  # fractions work, too
        lora_dropout=structure.dropout,
        target_modules=names if isinstance(names, str) else list(names),
        fan_in_fan_out=model.config.model_type == "gpt2",
        use_dora=structure.dora,
    )
    wrapped = peft.get_peft_model(copy.deepcopy(model), config, **options)
    with torch.no_grad():
        for name, parameter in peft_entries(wrapped).items():
            parameter.data = state[name].clone()
    return wrapped


def peft_entries(wrapped: peft.PeftModel) -> dict[str, nn.Parameter]:
    """The adapter's parameters under the names that the project gives them."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }


def bfloat16(enabled: bool) -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def product(state: State, layer: str) -> Tensor:
    """The update of a layer that an adapter's state stands for."""
    return state[f"{layer}.lora_B"] @ state[f"{layer}.lora_A"]
