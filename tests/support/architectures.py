"""Every causal language model that the installed transformers can make from a configuration, tiny."""

import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from llm_fed.testing.tiny import VOCABULARY, drawn

LARGEST = 2_000_000  # parameters
# By the names that configurations have for them, sizes that make any model small.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "intermediate_size": 48,
    "ffn_dim": 48, "d_ff": 48, "n_inner": 48, "ffn_hidden_size": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "num_hidden_layers": 2, "num_layers": 2,
    "n_layer": 2, "n_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attention_head_dim": 8, "max_position_embeddings": 128,
    "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "initializer_range": 0.2, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_topk": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
    "state_size": 8, "n_groups": 1, "conv_kernel": 4, "expand": 2, "time_step_rank": 4, "lru_width": 32,
    "embedding_size": 32, "word_embed_proj_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "sliding_window": 4, "attention_window_size": 4,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
    "first_k_dense_replace": 1, "mlp_layer_types": None,
}  # fmt: skip
# What single families need beside them, or in their place.
_LATENT, _MIXED = {"num_key_value_heads": 4}, {"num_hidden_layers": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash",
         "minicpm3", "sarvam_mla", "youtu"), _LATENT,
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "recurrent_gemma"), _MIXED),
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cwm": {"bos_token_id": 0},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8},
    # Without a cache, transformers lets Moshi see beyond its window, and with one, 4.57 lets PhiMoE see less.
    **dict.fromkeys(("moshi", "phimoe"), {"sliding_window": 128}),
    "modernbert-decoder": {"bos_token_id": 0, "cls_token_id": 0, "sep_token_id": 1},
    "reformer": {"is_decoder": True},
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
WITH_PICTURES = {"gemma3": {**_VISION, "image_size": 28, "patch_size": 14}}  # their second configuration


def made(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random tiny model of a family, in evaluation mode.

    Raises:
        Exception: of any kind, where no such model can be made, or not a tiny one.
    """
    config = configured(family, **changes)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{family} has {count:,} parameters in its smallest form")
    model: PreTrainedModel = drawn(lambda: kind(config), seed)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if changes.get("tie_word_embeddings") and head is not None and head.weight.shape != embedding.weight.shape:
        raise ValueError(f"the head of {family} has other rows than its embedding")
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin at one and biases at zero, which would hide mistakes in them
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draws))
    return model.eval()


def configured(family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of such a model."""
    kind = CONFIG_MAPPING[family]
    if family in WITH_PICTURES:
        text = configured(f"{family}_text", **changes).to_dict()
        return kind(text_config=text, vision_config=WITH_PICTURES[family])
    known = inspect.signature(kind.__init__).parameters
    wanted = {key: value for key, value in {**SIZES, **OWN.get(family, {}), **changes}.items() if key in known}
    return kind(**wanted)


def families() -> list[str]:
    """The names of all families, as `model_type` has them."""
    return [config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING]
