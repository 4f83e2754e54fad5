"""What transformers 4.57 needs in a model's folder to read the same model as version 5 does: many servers have it.

Version 5 has one `rope_parameters` for what was in several keys before, and other names for some classes of tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

# The causal language models of transformers 4.57.3 (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).
_LIST = Path(__file__).parents[1] / "assets" / "transformers-4.57-families.txt"
FAMILIES = frozenset(_LIST.read_text(encoding="utf-8").split())
# What else of a configuration had another name: by family, the newer and the older one.
_RENAMED = {"qwen3_moe": {"num_local_experts": "num_experts"}}
# By family the key of kinds of layers and their names, where 4.57 has others than version 5, which reads both.
_LAYER_TYPES = {
    "granitemoehybrid": ("layer_types", {"linear_attention": "mamba", "full_attention": "attention"}),
    "zamba2": ("layers_block_type", {"linear_attention": "mamba"}),
}
# Families of which 4.57 knows no scaled rotary embeddings but these; it ignores others, or refuses the model.
_SCALED = {
    "llama4_text": ("llama3",), "modernbert-decoder": (), "nemotron": (), "olmo": ("linear", "dynamic"),
    "olmo2": ("linear", "dynamic"),
}  # fmt: skip
_TWO_KEYS = ("olmo", "olmo2")  # their `rope_scaling` must have a type and a factor, and nothing else
_ONE_THETA = ("modernbert-decoder", "olmo3")  # for full and sliding attention
# Families of which 4.57 knows rotary embeddings on a part of each head.
_PARTIAL = (
    "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_neox_japanese", "nemotron", "persimmon", "phi", "phi3",
    "phi4_multimodal", "qwen3_next", "stablelm",
)  # fmt: skip
# By family its number of groups, of which version 5.23 takes a norm each, and older ones take one norm over all.
_GROUPS = {"bamba": "mamba_n_groups", "granitemoehybrid": "mamba_n_groups", "mamba2": "n_groups"}


def advice(settings: Mapping[str, Any]) -> str:
    """What the user should know who loads a model with transformers 4.57, or nothing. `settings`: a config.json as
    version 5 writes it, with `transformers_version` as the base's own has it."""
    kind, needed = settings["model_type"], _first_version(settings)
    why = next(filter(None, map(_unread_rope, _parts(settings))), "")
    if kind not in FAMILIES:
        why = f"does not know {kind}"
    elif settings.get(_GROUPS.get(kind, ""), 1) > 1 and _numbers(version("transformers")) >= (5, 23):
        why, needed = f"takes one norm over all groups of {kind}", "5.23"
    elif kind == "zamba2":
        why = f"reads texts of more than chunk_size tokens with {kind} in another way where mamba-ssm is not installed"
    elif kind in ("dbrx", "fuyu") and _numbers(str(settings.get("transformers_version"))) >= (5,):
        why = f"does not read a config.json of {kind} that version 5 has written, as that of the base"
    if why:
        return f"transformers 4.57 {why}; to load it takes {needed} or newer"
    if any(part.get("attn_logit_softcapping") for part in _parts(settings)):
        return f'transformers 4.57 caps the attention of {kind} only if it is loaded with attn_implementation="eager"'
    return ""


def _parts(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of a model and of the models in it."""
    return [settings, *(value for value in settings.values() if isinstance(value, Mapping) and "model_type" in value)]


def _unread_rope(settings: Mapping[str, Any]) -> str:
    """Why transformers 4.57 reads other rotary embeddings of a model or a part, or none, after its name; or nothing."""
    kind = settings["model_type"]
    everywhere, sliding = _by_layers(settings.get("rope_parameters") or {})
    form = everywhere.get("rope_type", "default")
    if form != "default" and form not in _SCALED.get(kind, (form,)):
        return f"does not know rotary embeddings of {kind} with rope_type={form}"
    if everywhere.get("partial_rotary_factor", 1.0) != 1.0 and kind not in _PARTIAL:
        return f"does not know rotary embeddings of {kind} on a part of each head"
    if form == "longrope" and kind == "phimoe":
        return "reads texts beyond original_max_position_embeddings of phimoe in another way"
    if form == "longrope" and _is_phi3(kind) and "factor" in everywhere:
        return f"knows no factor of the longrope of {kind}"
    if form == "longrope" and kind in ("deepseek_v3", "longcat_flash") and "factor" not in everywhere:
        return f"knows no longrope of {kind} without a factor"
    if sliding.get("rope_type", "default") != "default" and sliding is not everywhere:
        return f"does not scale the rotary embeddings of the sliding attention of {kind}"
    if kind in _ONE_THETA and everywhere.get("rope_theta") != sliding.get("rope_theta"):
        return f"knows one rope_theta for all layers of {kind}"
    return ""


def _by_layers(rope: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The rotary embeddings of layers with full and with sliding attention; the same where they do not differ."""
    full, sliding = (rope.get(layers) or rope for layers in ("full_attention", "sliding_attention"))
    return full, sliding


def _first_version(settings: Mapping[str, Any]) -> str:
    """A version of transformers that knows a model: the one that has written its config.json, or else this one."""
    written = str(settings.get("transformers_version") or "")
    return written if _numbers(written) > (4, 57) else version("transformers")


def _numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


def with_older_keys(settings: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """A config.json with what version 4 reads beside what version 5 does; as it is, of a family that version 4 does not
    know, since version 5 need not read older keys of it. `config`: the same as an object of version 5. What it says is
    added where `settings` say nothing."""
    return _with_older_keys(settings, config) if config.model_type in FAMILIES else dict(settings)


def _with_older_keys(settings: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """As `with_older_keys`, of a model or of a part of one."""
    made = {**_rope(config), **settings}
    for new, old in _RENAMED.get(config.model_type, {}).items():
        made.setdefault(old, getattr(config, new))
    if settings.get("dtype"):
        made["torch_dtype"] = settings["dtype"]
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(inner := getattr(config, key, None), PreTrainedConfig):
            made[key] = _with_older_keys(value, inner)
    if found := _LAYER_TYPES.get(config.model_type):
        key, names = found
        made[key] = [names.get(each, each) for each in made.get(key) or config.layer_types]
    return made


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of version 4 for the rotary embeddings of a model, if it has some."""
    rope, kind = getattr(config, "rope_parameters", None) or {}, config.model_type
    everywhere, sliding = _by_layers(rope)
    theta, share = everywhere.get("rope_theta"), everywhere.get("partial_rotary_factor")
    if theta is None:
        return {}
    if kind == "modernbert-decoder":
        return {"global_rope_theta": theta, "local_rope_theta": sliding["rope_theta"]}
    keys = {"rope_theta": theta, "rope_scaling": _scaling(everywhere, kind)}
    if everywhere.get("rope_type") == "longrope":
        keys["original_max_position_embeddings"] = everywhere["original_max_position_embeddings"]
        if _is_phi3(kind) and "factor" in everywhere:  # version 4 cannot say it, and version 5 would not see it
            del keys["rope_scaling"]
    if share is not None:
        keys["partial_rotary_factor"] = share
    if kind.startswith("gpt_neox"):
        keys |= {"rotary_emb_base": theta, "rotary_pct": 1.0 if share is None else share}
    if sliding is not everywhere:
        keys["rope_local_base_freq"] = sliding["rope_theta"]
    return keys


def _scaling(rope: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """`rope_scaling` of version 4."""
    if rope.get("rope_type", "default") == "default":
        return None
    if _is_phi3(kind):  # it takes these three alone
        return {"type": rope["rope_type"], **{key: rope[key] for key in ("short_factor", "long_factor") if key in rope}}
    if kind in _TWO_KEYS and rope["rope_type"] in _SCALED[kind]:
        return {"type": rope["rope_type"], "factor": rope["factor"]}
    keys = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if rope["rope_type"] == "longrope" and "factor" in rope:  # version 4 takes another than the one that it reads
        factor, context = rope["factor"], rope["original_max_position_embeddings"]
        keys.setdefault("attention_factor", math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0)
    return keys


def _is_phi3(kind: str) -> bool:
    return kind in ("phi3", "phi4_multimodal")


def tokenizer_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json that both versions read; the same where it was written by version 4."""
    made = dict(settings)
    if made.get("tokenizer_class") == "TokenizersBackend":
        made["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(made.get("extra_special_tokens"), list):
        made["additional_special_tokens"] = made.pop("extra_special_tokens")
    return made
