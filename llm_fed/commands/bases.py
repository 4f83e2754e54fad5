"""What `llm-fed doctor --base` says of a base from its configuration and tokenizer, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from rich import filesize
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from llm_fed.basics.errors import UserError
from llm_fed.commands.init import BATCH, PASSES
from llm_fed.commands.known_base import rates_of
from llm_fed.models.families import feels_padding
from llm_fed.models.fused_experts import fused_parameters, known_parameters
from llm_fed.models.loading import attention, check_name, config_of, explain, read_tokenizer
from llm_fed.models.lora import Lora, layout, targets
from llm_fed.models.rotary import context
from llm_fed.settings.config import AdapterConfig, BaseConfig
from llm_fed.tasks.templates import filled

# `model_type` of the families of which a small model was compared with stock PEFT: training, answers and export
# (tests/engine/test_bases.py).
COMPARED = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "smollm3",
    "granite", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe",
)  # fmt: skip
_HEADROOM = 1.1  # of 4-bit weights: scales, and what stays in 16 bits beside embeddings


def known_of(name: str, revision: str | None = None) -> list[dict[str, Any]]:
    """One finding per question, {what, found, ok}, as of `doctor.examine`; of a base that cannot be used one is not ok.

    Raises:
        UserError: there is no such folder or Hub model, or it is no causal language model.
    """
    index = check_name(name)
    config = config_of(name, index, revision)
    tokenizer, ends, _ = read_tokenizer(BaseConfig(name, revision=revision))
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
        "chat template": lambda: _template(tokenizer),
        "end-of-answer tokens": lambda: _end(ends, tokenizer),
        "init proposes": lambda: _proposed(model, tokenizer),
    }
    findings = []
    for what, answer in questions.items():
        try:
            findings.append({"what": what, "found": answer(), "ok": True})
        except UserError as error:  # one way of adapting it is none; another may be
            findings.append({"what": what, "found": f"no: {error}", "ok": not what.startswith("end")})
    return findings


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
    config = model.config.get_text_config()
    length = context(config)
    window = getattr(config, "sliding_window", None)
    known = "not stated" if length is None else f"{length:,} tokens"
    return known + (f"; a layer with a sliding window sees {window:,} of them" if window else "")


def _adapters(model: PreTrainedModel, adapter: AdapterConfig) -> str:
    structure = Lora.from_config(adapter)
    layers = [*targets(model, structure), *fused_parameters(model, structure.parameters)]
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    size = layout(model, structure).size
    return f"{len(layers)} layers ({', '.join(kinds)}), {size:,} parameters at rank {structure.rank}"


def _proposed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    config = model.config.get_text_config()
    rates = rates_of(config)
    return (
        f"{'task.template=chat, ' if tokenizer.chat_template else ''}{PASSES} passes in steps of {BATCH} "
        f"examples, local.lr={rates['lr']:g} falling to local.lr_end={rates['lr_end']:g}, as the hidden size is "
        f"{getattr(config, 'hidden_size', 'unknown')}"
    )


def _tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    rows = len(cast(torch.Tensor, model.get_input_embeddings().weight))
    without = sorted((id, token) for token, id in tokenizer.get_vocab().items() if id >= rows)
    if not without:
        return f"{len(tokenizer):,}, each with an embedding"
    names = ", ".join(f"{token!r} ({id})" for id, token in without[:4]) + (", ..." if len(without) > 4 else "")
    return (
        f"{len(tokenizer):,}, of which {len(without)} have no embedding: {names}. Texts with such a token are refused; "
        "call model.resize_token_embeddings(len(tokenizer)) and save the base again"
    )


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if not template:
        return "none, so task.template=chat is not possible; use alpaca, alpaca-short, plain or your own"
    return "yes (task.template=chat)"


def _end(ends: set[int], tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.eos_token is None and tokenizer.pad_token is None:
        raise UserError("the tokenizer has neither a pad nor an EOS token; set one in its tokenizer_config.json")
    every = {*ends, *(filled("chat", tokenizer).ends if tokenizer.chat_template else ())}
    return ", ".join(repr(tokenizer.decode([token])) for token in sorted(every))
