"""What `llm-fed doctor` says: of the machine and the libraries, whether the pieces that can break really work here; or
of a base, what llm_fed can do with it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypedDict, cast

import torch
from rich import filesize
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from llm_fed.basics import cgroups
from llm_fed.basics.errors import UserError
from llm_fed.models.families import feels_padding
from llm_fed.models.fused_experts import fused_parameters, known_parameters
from llm_fed.models.loading import attention, check_name, config_of, explain, read_tokenizer
from llm_fed.models.lora import Lora, layout, targets
from llm_fed.models.rotary import context
from llm_fed.settings.config import AdapterConfig, BaseConfig
from llm_fed.tasks.templates import filled

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes")
TINY_BASE = Path(__file__).parents[1] / "assets" / "tiny-base"
# `model_type` of the families of which a small model was compared with stock PEFT: training, answers and export
# (tests/engine/test_bases.py).
COMPARED = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "smollm3",
    "granite", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe",
)  # fmt: skip
NO_TEMPLATE = "none, so task.template=chat is not possible; use alpaca, alpaca-short, plain or your own"
_HEADROOM = 1.1  # of 4-bit weights: scales, and what stays in 16 bits beside embeddings


class Examined(TypedDict):
    what: str
    found: str
    ok: bool


def _examined(what: str, check: Callable[[], str]) -> Examined:
    """Of one check or question; one that raises is not ok."""
    try:
        return {"what": what, "found": check(), "ok": True}
    except UserError as error:  # of a way of adapting a base; another may do
        return {"what": what, "found": f"no: {error}", "ok": what.startswith("adapters")}
    except Exception as error:
        return {"what": what, "found": f"{type(error).__name__}: {error}", "ok": False}


def examine() -> list[Examined]:
    """A finding per check of this machine."""
    checks: dict[str, Callable[[], str]] = {
        "libraries": lambda: ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES),
        "device": _device,
        "memory and disk": _space,
        "fused training (two clients, one step, shipped base)": lambda: _train(None),
        "4-bit base (bitsandbytes nf4)": lambda: _train("nf4"),
    }
    return [_examined(what, check) for what, check in checks.items()]


def _device() -> str:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return f"{torch.cuda.get_device_name()}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads; torch finds no GPU"


def _space() -> str:
    (free, limit), disk = cgroups.free_memory(), shutil.disk_usage(".")
    within = "" if limit is None else f" (within {limit.name}, which is {limit.size / 2**30:.1f} GiB)"
    return f"{free / 2**30:.1f} GiB of memory{within} and {disk.free / 2**30:.1f} GiB of disk free"


def _train(quantization: Literal["nf4"] | None) -> str:
    from llm_fed.basics.rng import generator
    from llm_fed.engine.bank import AdaptedModel
    from llm_fed.engine.fit import fit
    from llm_fed.kinds.language import load_base
    from llm_fed.method.optimizer import Optimizer
    from llm_fed.method.requests import Fit
    from llm_fed.models.lora import Lora, draw
    from llm_fed.tasks.common import Encoded

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = load_base(BaseConfig(name=str(TINY_BASE), dtype="float32", quantization=quantization), device)
    structure = Lora(2, 4, 0.0, ("q_proj", "v_proj"))
    start = draw(base.model, structure, generator(0))
    example = Encoded([1, 5, 6, 7], [False, False, True, True])
    jobs = [Fit(name, structure, start, [example], [[0]], Optimizer(1e-3)) for name in "ab"]
    results, _ = fit(AdaptedModel(base.model, structure, autocast=base.autocast), jobs)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return f"loss {results[0].losses[0]:.3f}"  # type: ignore[union-attr]


def known_of(name: str) -> list[Examined]:
    """A finding per question about a base, from its configuration and tokenizer, before any weight is loaded; of a base
    that cannot be used one is not ok. UserError: there is no such folder or Hub model, or it is no causal language
    model."""
    config = config_of(name, check_name(name), None)
    tokenizer, ends, _ = read_tokenizer(BaseConfig(name))
    try:
        with torch.device("meta"):  # layers and shapes without their numbers
            attn = attention(AutoModelForCausalLM, config, torch.float32)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation=attn)
        model.tie_weights()  # which some transformers do not do by themselves here
    except Exception as error:  # transformers and tokenizers share no class of errors
        raise UserError(explain(name, error, "a causal LM")) from error
    experts = AdapterConfig(dropout=0, target_modules=(), target_parameters=known_parameters(model))
    questions: dict[str, Callable[[], str]] = {
        "family": lambda: _family(model),
        "answers in batches": lambda: _batches(model),
        "size": lambda: _size(model),
        "context": lambda: _context(model),
        "adapters on q_proj and v_proj (the default)": lambda: _adapters(model, AdapterConfig()),
        "adapters on all-linear": lambda: _adapters(model, AdapterConfig(target_modules="all-linear")),
        **({"adapters on the experts": lambda: _adapters(model, experts)} if experts.target_parameters else {}),
        "tokens": lambda: _tokens(model, tokenizer),
        "chat template": lambda: "yes (task.template=chat)" if tokenizer.chat_template else NO_TEMPLATE,
        "end-of-answer tokens": lambda: _end(ends, tokenizer),
    }
    return [_examined(what, answer) for what, answer in questions.items()]


def _family(model: PreTrainedModel) -> str:
    kind = model.config.get_text_config().model_type
    compared = "tested against stock PEFT on a small model" if kind in COMPARED else "not tested against stock PEFT yet"
    return f"{kind} ({type(model).__name__}), {compared}"


def _batches(model: PreTrainedModel) -> str:
    if feels_padding(model.config):
        return "prompts of one length at a time, as padding may change what models of this family say"
    return "prompts of any length together; of a small model each answer was the same as alone"


def _size(model: PreTrainedModel) -> str:
    count = sum(p.numel() for p in model.parameters())
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    head = model.get_output_embeddings()
    packed = linear - (head.weight.numel() if isinstance(head, torch.nn.Linear) else 0)
    nf4 = (packed / 2 + 2 * (count - packed)) * _HEADROOM
    full, half, quarter = (filesize.decimal(round(size)) for size in (4 * count, 2 * count, nf4))
    return f"{count:,} parameters; weights of {full} in float32, {half} in bfloat16, about {quarter} in nf4"


def _context(model: PreTrainedModel) -> str:
    length, window = context(model.config), model.config.get_text_config().to_dict().get("sliding_window")
    known = "not stated" if length is None else f"{length:,} tokens"
    return known + (f"; a layer with a sliding window sees {window:,} of them" if window else "")


def _adapters(model: PreTrainedModel, adapter: AdapterConfig) -> str:
    structure = Lora.from_config(adapter)
    layers = [*targets(model, structure), *fused_parameters(model, structure.parameters)]
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    size = layout(model, structure).size
    return f"{len(layers)} layers ({', '.join(kinds)}), {size:,} parameters at rank {structure.rank}"


def _tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    rows = len(cast(torch.Tensor, model.get_input_embeddings().weight))
    if not (without := sorted((id, token) for token, id in tokenizer.get_vocab().items() if id >= rows)):
        return f"{len(tokenizer):,}, each with an embedding"
    names = ", ".join(f"{token!r} ({id})" for id, token in without[:4]) + (", ..." if len(without) > 4 else "")
    return (
        f"{len(tokenizer):,}, of which {len(without)} have no embedding: {names}. Texts with such a token are refused; "
        "call model.resize_token_embeddings(len(tokenizer)) and save the base again"
    )


def _end(ends: set[int], tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.eos_token is None and tokenizer.pad_token is None:
        raise UserError("the tokenizer has neither a pad nor an EOS token; set one in its tokenizer_config.json")
    every = {*ends, *(filled("chat", tokenizer).ends if tokenizer.chat_template else ())}
    return ", ".join(repr(tokenizer.decode([token])) for token in sorted(every))
