"""What is known of families of language models (`model_type`): whose rows can be padded, and which cannot be bases.

`tests/support/rows_alone.py` finds it out: it makes every family of transformers tiny and compares rows of a batch with
the same rows alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_fed.basics.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Prompts of unequal length can be answered in one batch: padding before them is not felt. Other families are answered
# in batches of one length.
PADDED = frozenset(
    (
        "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "bailing_hybrid", "bamba", "beam",
        "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl",
        "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dory", "dots1", "emu3", "ernie4_5", "ernie4_5_moe",
        "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "flint", "fuyu", "gemma", "gemma2",
        "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text",
        "glm", "glm4", "glm4_moe", "glm4_moe_lite", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox",
        "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
        "granitemoehybrid", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
        "hyperclovax", "inkling2_loop_text", "inkling2_text", "inkling_text", "internlm3", "iquestcoder", "jais2",
        "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4",
        "llama4_text", "longcat_flash", "mamba2", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
        "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "mllama", "modernbert-decoder",
        "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "persimmon",
        "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "seed_oss",
        "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "xglm", "youtu", "zamba2", "zaya",
    )
)  # fmt: skip

# Encoders that are also decoders, by `is_decoder` in their configuration.
_ENCODERS = frozenset(
    (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    )
)  # fmt: skip

_RANKED = "its layers choose by rank which tokens they see, and where ranks are equal the choice depends on padding"
_NO_CACHE = "transformers keeps no cache for it in which rows can be selected, which generation needs"
_SEE_LATER = "its tokens see later ones"
_DRAFTS = "it drafts tokens for another model, whose states it needs"
_REFUSED = {
    "axk2": _RANKED,
    "cpmant": _SEE_LATER,
    "deepseek_v32": _RANKED,
    "doge": "its router mixes the tokens of all rows of a batch",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "glm_moe_dsa": _RANKED,
    "hy_v4": _RANKED,
    "openai-gpt": _NO_CACHE,
    "prophetnet": "as a decoder alone it predicts several tokens at once",
    "recurrent_gemma": "its recurrent state lies in the model itself, where rows cannot be selected",
    "reformer": "its attention draws random numbers and mixes chunks of tokens",
    "rwkv": _NO_CACHE,
    "xlm": _SEE_LATER,
    "xlnet": _SEE_LATER,
}

# By family the linear layers, by the last parts of their names, whose weights are read where the layers are not called,
# so that an adapter on them would not be felt: always, or (out_proj) in kernels for a GPU, for which PEFT refuses it.
READ_LAYERS = {
    "falcon_h1": ("out_proj",),
    "falcon_mamba": ("dt_proj", "out_proj"),
    "jamba": ("dt_proj",),
    "mamba": ("dt_proj", "out_proj"),
    "mamba2": ("out_proj",),
    "nemotron_h": ("out_proj",),
}


def check_family(config: PretrainedConfig, name: str) -> None:
    """Refuse a base whose rows would not be what they are alone. UserError: its `name`, its family, and why."""
    for kind in (config.model_type, _family_of(config)):
        reason = _REFUSED.get(kind)
        if kind in _ENCODERS and not config.to_dict().get("is_decoder"):
            reason = (
                "is_decoder is false in its configuration, so its tokens see later ones; it can be trained as a "
                "classifier, with task.name=classification"
            )
        if reason:
            raise UserError(f"base.name={name!r} is of the family {kind}, which cannot be a base: {reason}")


def writes(config: PretrainedConfig) -> bool:
    """Whether a base of this configuration answers with texts: no encoder, nor a model with a classification head."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # takes seconds to import

    has_head = any(str(name).endswith("ForSequenceClassification") for name in config.architectures or ())
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not has_head and not _encodes(config)


def is_causal(config: PretrainedConfig) -> bool:
    """Whether no token sees a later one, so that padding behind a text reaches none of it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # as in `writes`

    sees_later = _REFUSED.get(config.model_type) == _SEE_LATER or _encodes(config)
    both_ways = config.get_text_config().to_dict().get("use_bidirectional_attention", False)
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not (sees_later or both_ways)


def _encodes(config: PretrainedConfig) -> bool:
    return config.model_type in _ENCODERS and not config.is_decoder


def _family_of(config: PretrainedConfig) -> str:
    """The `model_type` of the part that reads text."""
    try:
        return str(config.get_text_config().model_type)
    except ValueError:  # several parts read text
        return str(config.model_type)


def feels_padding(config: PretrainedConfig) -> bool:
    """Whether a row may depend on padding before or within it, as far as is known; behind it, it never does."""
    return config.model_type not in PADDED
