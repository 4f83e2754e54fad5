"""Loads the frozen base model and its tokenizer from a folder or the Hub, in full precision or quantized."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llm_fed.config import BaseConfig
from llm_fed.errors import UserError
from llm_fed.tasks.common import lookup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = {"nf4": 4, "int8": 8}  # bits


@dataclass
class Base:
    """A frozen causal language model: no parameter requires a gradient and its own dropout is off."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase  # has a pad token
    name: str  # as configured: what exported adapters name as their base
    dtype: torch.dtype  # of the weights; of the products, where the weights are quantized
    autocast: torch.dtype | None  # the autocast dtype of forward passes; None for float32


def load_base(config: BaseConfig, device: str) -> Base:
    """The base of a run on `device` ("cpu", "cuda", "cuda:1"). Only safetensors weights are read, no code of a repository.

    A tokenizer without a pad token pads with its EOS; padding is always masked, so the choice changes no result.
    The model is in eval mode, but with activation checkpointing in train mode, because transformers checkpoints no
    other; the configured dropout rates are set to 0, so the two modes compute the same. Its cache is off unless a
    forward pass asks for it.

    Raises:
        UserError: unknown dtype or quantization, no such folder or Hub model, or one that is no complete causal LM.
    """
    dtype = lookup("base.dtype", config.dtype, DTYPES)
    if config.quantization is not None:
        lookup("base.quantization", config.quantization, QUANTIZATIONS)
    _check_name(config.name)
    # Set before the first use: a tokenizer that has worked in threads warns at every later fork (data loaders).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        settings = AutoConfig.from_pretrained(config.name, revision=config.revision, trust_remote_code=False)
        _silence(settings)
        tokenizer = AutoTokenizer.from_pretrained(config.name, revision=config.revision, trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            config.name,
            config=settings,
            revision=config.revision,
            dtype=dtype,
            device_map={"": device},
            quantization_config=_quantization(config.quantization, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers, tokenizers, safetensors and bitsandbytes share no class of errors
        raise UserError(_explain(config, error)) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"base.name={config.name!r} lacks {len(missing)} weights of a causal LM, e.g. {missing[0]}")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"the tokenizer of {config.name!r} has neither a pad nor an EOS token, so batches cannot be padded; "
                'set "eos_token" or "pad_token" in its tokenizer_config.json'
            )
        tokenizer.pad_token = tokenizer.eos_token
    _freeze(model)
    if config.activation_checkpointing:
        _checkpoint_activations(model, config.name)
    return Base(model, tokenizer, config.name, dtype, None if dtype == torch.float32 else dtype)


def _check_name(name: str) -> None:
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"base.name={name!r} is no model folder: it has no config.json (see save_pretrained)")
    looks_like_a_path = name.startswith((".", "~", "/")) or name.count("/") > 1 or not name
    if looks_like_a_path and not folder.is_dir():
        raise UserError(f"base.name={name!r} is no folder; give an existing one, or a Hub id such as Qwen/Qwen3-0.6B")


def _explain(config: BaseConfig, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if Path(config.name).is_dir():
        return f"base.name={config.name!r}: this folder cannot be loaded as a causal LM: {reason}"
    return (
        f"base.name={config.name!r} is no folder here, and the Hub did not give it: {reason} "
        "Offline, give the folder of a downloaded model; for a gated model, run `hf auth login`."
    )


def _silence(config: PreTrainedConfig) -> None:
    """Sets every rate of dropout, dropped layers and router noise to 0, also those that layers read in `forward`."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _silence(value)
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def _quantization(name: str | None, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    if name is None:
        return None
    if QUANTIZATIONS[name] == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=name,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _freeze(model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    model.eval()
    model.config.use_cache = False
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes would repack 4-bit weights at the first forward pass in eval mode, for
        # kernels without a backward: the gradient of every layer below would be lost.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _checkpoint_activations(model: PreTrainedModel, name: str) -> None:
    # One method under two names: the second is older, and deprecated where the first exists.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"base.activation_checkpointing: {name!r} does not support it; set it to false") from error
    model.train()
