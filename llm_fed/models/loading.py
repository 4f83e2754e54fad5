"""Loads the frozen base model and its tokenizer from a folder or the Hub, in full precision or quantized."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

from llm_fed.basics import cgroups
from llm_fed.basics.errors import UserError, no_locks, panics
from llm_fed.models import forms
from llm_fed.models.families import check_family
from llm_fed.settings import objects
from llm_fed.settings.config import BaseConfig, Dtype
from llm_fed.settings.paths import base_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = {"nf4": 4, "int8": 8}  # bits
CPU = Path("/proc/cpuinfo")


def settle_dtype(config: BaseConfig, device: str) -> tuple[BaseConfig, str]:
    """`base.dtype: auto` as what it means on a device, and a line that says so (empty where a dtype is given). A GPU
    without bfloat16 computes in float32 like a CPU: float16 would be faster there, but the activations of models that
    were trained in bfloat16 may be too large for it."""
    if config.dtype != "auto":
        return config, ""
    kind = torch.device(device).type
    has = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype: Dtype = "bfloat16" if has else "float32"
    said = f"computing in {dtype}, the default on this device ({kind}); base.dtype overrides"
    return replace(config, dtype=dtype), said


def bfloat16_hint(dtype: Dtype = "auto") -> str:
    """A line where a CPU's flags (avx512_bf16, amx_bf16; of ARM bf16) speak for another `base.dtype`; else empty."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU.read_text() if CPU.is_file() else "", re.MULTILINE)
    fast = flags and any(flag.endswith("bf16") for flag in flags[1].split())
    if flags and not fast and dtype == "bfloat16":
        return "bfloat16 is slow on this CPU, which has no instructions for it; base.dtype=float32 trains faster"
    return "this CPU computes in bfloat16, so base.dtype=bfloat16 may train faster" if fast and dtype == "auto" else ""


def shortage(config: BaseConfig, device: str) -> str:
    """What is too little, in words, for the weights of a base on the CPU; empty where they fit, and where a container
    or a job has no limit: without one the system may swap, but a process over its limit is killed without a message.
    `config`: with a dtype other than `auto`."""
    free, limit = cgroups.free_memory()
    folder = base_folder(config.name, config.revision)
    if limit is None or device != "cpu" or config.quantization or folder is None:
        return ""
    try:
        numbers = 0
        for path in folder.glob("*.safetensors"):
            with safe_open(str(path), framework="pt") as file:  # only its header is read
                numbers += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError):  # loading says what is wrong
        return ""
    size = numbers * DTYPES[config.dtype].itemsize
    if size <= free:
        return ""
    half = ", or base.dtype=bfloat16 where half of it suffices" if config.dtype == "float32" else ""
    return (
        f"the base takes {size / 1e9:.2f} GB in {config.dtype}, but {limit.name} leaves {free / 1e9:.2f} GB, so the "
        f"kernel may kill this run without a message; it needs more memory, or a smaller base{half}"
    )


def end_tokens(tokenizer: PreTrainedTokenizerBase, declared: int | Sequence[int] | None) -> set[int]:
    """The tokens that end a base's answer: its tokenizer's EOS, and what its generation_config.json declares beside it.
    Of what is declared only control tokens count. A token of text may be part of an answer, so to end there would be
    one of the settings of decoding that are not to change a score."""
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    named = declared if isinstance(declared, Sequence) else [declared]
    return {*(id for id in named if isinstance(id, int) and id in control), tokenizer.eos_token_id}


def read_tokenizer(config: BaseConfig) -> tuple[PreTrainedTokenizerBase, set[int], int]:
    """A base's tokenizer, the tokens that the base ends an answer with, and the rows of its embedding; without weights.
    UserError: there is no such folder or Hub model, or it is no language model."""
    location = check_name(config.name, weights=False)
    try:
        tokenizer, settings = read_words(location, config.revision), read_settings(location, config.revision)
        try:
            stops = GenerationConfig.from_pretrained(location, revision=config.revision or "main").eos_token_id
        except OSError:  # it has none of its own
            stops = GenerationConfig.from_model_config(settings).eos_token_id
    except Exception as error:  # transformers and tokenizers share no class of errors
        raise UserError(explain(config.name, error, "a causal LM")) from error
    return tokenizer, end_tokens(tokenizer, stops) - {None}, int(settings.get_text_config().vocab_size)


def attention(models: Any, config: PretrainedConfig, dtype: torch.dtype, device: str = "cpu") -> str:
    """Which attention a model is given, so that none counts that its config.json names, whose code transformers would
    fetch. The fused one of CPUs without AMX has a slow backward pass in bfloat16. `models`: the AutoModel class that
    loads it."""
    kinds = models._model_mapping.get(type(config), PreTrainedModel)
    fused = all(kind._supports_sdpa for kind in (kinds if isinstance(kinds, tuple) else [kinds]))
    return "sdpa" if fused and not (device == "cpu" and dtype == torch.bfloat16) else "eager"


def read_settings(location: str, revision: str | None = None, *, local: bool = False) -> PretrainedConfig:
    """A base's config.json as transformers reads it; ValueError where it asks for what no model has."""
    known, _ = PretrainedConfig.get_config_dict(location, revision=revision, local_files_only=local)
    forms.check_settings(known)
    return AutoConfig.from_pretrained(location, revision=revision, trust_remote_code=False, local_files_only=local)


def read_words(location: str, revision: str | None = None, *, local: bool = False) -> PreTrainedTokenizerBase:
    """A base's tokenizer, tried once; UserError where its tokenizer.json panics."""
    # Before the first use: a tokenizer that has worked in threads warns at every later fork (data loaders).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with panics(f"the tokenizer of {location}"):
        found = AutoTokenizer.from_pretrained(
            location, revision=revision, trust_remote_code=False, local_files_only=local
        )
        found("One, two: 3")
    return found


def check_rows(ids: Sequence[int], rows: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a token beyond the `rows` of a base's embedding. UserError: there is one; it is named."""
    most = max(ids, default=0)
    if most >= rows:
        raise UserError(
            f"a text has the token {tokenizer.convert_ids_to_tokens(most)!r} (number {most}), but the base has "
            f"embeddings of {rows} tokens only; call model.resize_token_embeddings(len(tokenizer)) and save the base "
            "again, or take the token out of its tokenizer"
        )


def check_name(name: str, also: Iterable[str] = (), weights: bool = True) -> str:
    """The name for transformers: a folder's full path, or a Hub id. `also`: other names that would have been possible
    here. `weights`: whether these are needed, and not the tokenizer alone. UserError: it is neither, or what it holds
    is no base (`forms`)."""
    if objects.is_object(name):
        objects.find("base.name", name)  # says what to do where this program does not have it
        raise UserError(f"base.name={name} is in no file, which is needed here; save the model, and give its folder")
    folder = Path(os.path.expanduser(name))
    if name and folder.is_dir():
        forms.check_folder(name, folder, weights)
        return str(folder)
    if name:
        forms.check_file(name, folder)
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or not name:
        known = "".join(f", {other}" for other in also)
        raise UserError(f"base.name={name!r} is not a folder; give one{known}, or a Hub id such as Qwen/Qwen3-0.6B")
    return name


def config_of(name: str, folder_or_id: str, revision: str | None = None, *, family: bool = True) -> PretrainedConfig:
    """The configuration of a base, before any of its weights are read. `folder_or_id`: what `check_name` says of the
    name. `family`: whether it is to write texts. UserError: it cannot be read, or is that of an adapter, of weights
    that no adapter can be trained on, or of a family that cannot be a base."""
    if not os.path.isdir(folder_or_id):
        with suppress(OSError, ValueError):  # what is wrong is said where the model is loaded
            if (found := find_adapter_config_file(folder_or_id, revision=revision)) is not None:
                raise forms.adapter(name, Path(found))
    try:
        config = read_settings(folder_or_id, revision)
    except Exception as error:  # transformers and tokenizers share no class of errors
        raise UserError(explain(name, error, "a causal LM")) from error
    forms.check_quantization(name, config.to_dict())
    if family:
        check_family(config, name)
    return config


def explain(name: str, error: Exception, kind: str) -> str:
    """Why the model `name` cannot be loaded as a `kind`, in words."""
    if locks := no_locks(error):
        return f"base.name={name!r} cannot be loaded: {locks}"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if os.path.isdir(os.path.expanduser(name)):
        return f"base.name={name!r}: this folder cannot be loaded as {kind}: {reason}"
    return (
        f"base.name={name!r} is not a folder here, and it could not be loaded from the Hub: {reason} "
        "Offline, give the folder of a downloaded model; for a gated model, run `hf auth login`."
    )


def quantization(name: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """How bitsandbytes is to quantise a base."""
    if QUANTIZATIONS[name] == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=name, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def checkpoint_activations(model: PreTrainedModel, name: str) -> None:
    # One method under two names: the second is older, and deprecated where the first exists.
    mark = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        mark({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"{name!r} does not support base.activation_checkpointing; set it to false") from error


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Let the EOS token stand for padding where the tokenizer has none of its own. UserError: it has neither."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"the tokenizer of {name!r} has neither a pad nor an EOS token; "
                'set "eos_token" or "pad_token" in its tokenizer_config.json'
            )
        tokenizer.pad_token = tokenizer.eos_token
