"""What differs between architectures where a head is put on an encoder or a decoder: which layers have adapters, what
is trained whole beside them, and how many tokens they read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from llm_fed.basics.errors import UserError
from llm_fed.models.images import head_of

# What the query and value projections of attention are called; of an architecture the first whose names it all has.
QUERY_AND_VALUE = (
    ("q_proj", "v_proj"),  # LLaMA, Qwen, OPT, ...
    ("query", "value"),  # BERT, RoBERTa, ELECTRA, ...
    ("query_proj", "value_proj"),  # DeBERTa v2 and v3
    ("q_lin", "v_lin"),  # DistilBERT, XLM
    ("q", "v"),  # MPNet
    ("Wqkv",),  # ModernBERT: all three in one
    ("in_proj",),  # DeBERTa
    ("c_attn",),  # GPT-2
    ("query_key_value",),  # GPT-NeoX, BLOOM, Falcon
    ("qkv_proj",),  # Phi-3
)

# Families whose texts feel the padding behind them, hence what lies beside them in a batch;
# `tests/engine/test_classifiers_alone.py` finds them.
FELT = {
    "canine": "whose convolutions read the padding behind a text",
    "convbert": "whose convolutions read the padding behind a text",
    "doge": "whose router mixes the tokens of all rows of a batch",
    "fnet": "whose Fourier transform reads the padding behind a text",
    "funnel": "which pools neighbouring tokens, the padding behind a text too",
    "mobilebert": "in which a token reads the next one, also where that is padding",
    "reformer": "whose attention draws random numbers and mixes chunks of tokens",
    "yoso": "whose attention draws random hashes",
    "tapas": "which reads tables, and needs to be told their rows",
    "mra": "whose attention works on blocks of the padded length",
    "perceiver": "whose decoder is built for one length of texts",
    "nystromformer": "whose landmarks are means over the padded length",
}


def usual_targets(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the layers of attention that LoRA adapts, query and value (Hu et al. 2022, Sec. 7.1); None where
    nothing is called like one that is known."""
    last = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return next((names for names in QUERY_AND_VALUE if last.issuperset(names)), None)


def heads_of(model: Any, missing: Collection[str], name: str) -> tuple[str, ...]:
    """The linear layers that are trained whole, the head last: all behind the encoder, and a pooler within it for which
    the checkpoint has no weights. `missing`: the parameters for which it has none. UserError: it lacks other weights
    than those of such layers, and of norms behind the encoder."""
    body, head = f"{model.base_model_prefix}.", head_of(model)
    absent, found, norms = {entry.rpartition(".")[0] for entry in missing}, list[str](), set[str]()
    for location, module in model.named_modules():
        behind = not location.startswith(body)
        if isinstance(module, nn.Linear) and (behind or (location in absent and "pooler" in location)):
            found.append(location)
        elif behind and type(module).__name__.endswith("Norm"):
            norms.add(location)
    left = absent - set(found) - norms
    if left:
        raise UserError(
            f"base.name={name!r} has no weights for {len(left)} layers of {type(model).__name__}, e.g. {min(left)}; "
            "give a complete encoder or language model"
        )
    return (*(location for location in found if location != head), head)


def longest(model: Any, tokenizer: Any) -> int | None:
    """How many tokens the model reads, with those that its tokenizer adds; None where it does not say."""
    offsets = (
        int(module.padding_idx) + 1  # RoBERTa's positions begin behind the padding's
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    )
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    known = [tokenizer.model_max_length, *([found - next(offsets, 0)] if found > 0 else [])]
    return min((int(each) for each in known if each < 10**9), default=None)
