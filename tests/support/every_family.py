"""Every family of causal language models that transformers can make from a configuration, made tiny with random
weights, in the variants of its configuration: kinds of RoPE, windows of attention."""

import warnings
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llm_fed.testing.tiny import VOCABULARY, drawn

CONTEXT, WINDOW, BORDER = 64, 4, 16  # tokens: of the base, seen by a layer with a window, where LongRoPE changes
FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Fields that give a model its size, by the value that makes it tiny.
_SIZES: dict[int, tuple[str, ...]] = {
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"),
    CONTEXT: (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "max_target_positions",
        "context_length",
    ),
    32: (
        "hidden_size", "d_model", "n_embd", "lru_width", "attention_hidden_size", "word_embed_proj_dim", "emb_dim",
        "embedding_dim", "embedding_size", "input_embedding_size", "output_embedding_size", "gated_norm_rank",
        "ple_embed_dim", "classifier_proj_size",
    ),
    40: (
        "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dim_ff", "dff",
        "n_inner", "d_inner", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size",
        "shared_intermediate_size", "swa_intermediate_size",
    ),
    16: (
        "moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size",
        "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "kv_lora_rank", "q_lora_rank", "qk_head_dim",
        "qk_nope_head_dim", "v_head_dim", "o_lora_rank", "attention_head_dim", "mamba_dt_rank", "time_step_rank",
        "ssm_state_size", "state_size", "mamba_d_state", "laurel_rank", "hidden_size_per_layer_input",
        "router_hidden_size", "adapter_rank", "index_head_dim", "hc_lowrank", "loop_gate_rank", "prompt_mid_dim",
        "moe_latent_size", "mamba_headdim", "mamba_head_dim", "mamba_d_head", "pronunciation_embed_dim",
        "shape_embed_dim", "ple_hidden_size", "chunk_size", "mamba_chunk_size",
    ),
    8: (
        "head_dim", "swa_head_dim", "qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_head_dim", "attention_head_size", "dim_head", "d_head", "kv_channels", "query_pre_attn_scalar",
        "rotary_dim", "d_rel", "global_head_dim",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
        "attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads", "swa_num_attention_heads",
        "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "index_n_heads", "linear_num_heads",
        "linear_num_value_heads", "n_mamba_heads", "index_topk", "mamba_n_heads", "mamba_num_heads",
    ),
    2: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads",
        "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "linear_num_key_heads", "mamba_n_groups",
        "n_groups", "num_global_key_value_heads", "index_topk_blocks", "num_key_value_groups", "top_k_experts",
    ),
    1: ("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"),
}  # fmt: skip
TINY = {name: size for size, names in _SIZES.items() for name in names}
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size", "local_attention",
            "attention_window_size", "keep_window_size")  # fmt: skip

# What the rules above do not make tiny, or not well.
_ORDINARY = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {"qk_head_dim": 24},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ORDINARY, "sliding_attention": _ORDINARY}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dory": {
        "num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "intermediate_size": [40, 40], "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
    },
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "attention_hidden_size": 64,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """The family's configuration with tiny sizes, as far as it has them; parts for text lie within some."""
    kind = CONFIG_MAPPING[family]
    whole, parts = kind(), {}
    known = whole.get_text_config()
    sizes = {**_tiny(known), **OVERRIDES.get(known.model_type, {}), **OVERRIDES.get(family, {}), **changes}
    for name in kind.sub_configs:
        part = getattr(whole, name, None)
        if part is known:
            parts[name] = sizes
        elif part is not None and family not in OVERRIDES:
            parts[name] = {**_tiny(part), "image_size": 16, "patch_size": 8}
    return kind(**parts) if known is not whole else kind(**sizes | parts)


def _tiny(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of such a configuration that make it tiny; one layer of each kind, but two at least."""
    fields = config.to_dict()
    sizes: dict[str, Any] = {
        name: value for name, value in TINY.items() if isinstance(fields.get(name), int) and fields[name]
    }
    sizes |= {name: WINDOW for name in _WINDOWS if isinstance(fields.get(name), int)}
    if "kv_lora_rank" in fields:  # latent attention has no groups
        sizes |= {"num_key_value_heads": 4, "qk_head_dim": 24}
    sizes |= {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.2}
    if kinds := list(dict.fromkeys(fields.get("layer_types") or ())):
        sizes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    if mlps := fields.get("mlp_layer_types"):
        every = list(dict.fromkeys(mlps)) * 8
        sizes["mlp_layer_types"] = every[: sizes.get("num_hidden_layers", 2)]
    return sizes


def variants(family: str) -> dict[str, dict[str, Any]]:
    """By name what each changes in the configuration; the first changes nothing."""
    model = build(family)
    config = model.config.get_text_config()
    found: dict[str, dict[str, Any]] = {"as it is": {}}
    if config._attn_implementation != "eager":
        found["eager attention"] = {"attn_implementation": "eager"}
    if getattr(config, "use_sliding_window", None) is False:
        found["window"] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        if getattr(config, "layer_types", None):
            found["window"]["layer_types"] = ["sliding_attention", "full_attention"]
    elif getattr(config, "sliding_window", WINDOW) is None:
        found["window"] = {"sliding_window": WINDOW}
    for field in _WINDOWS:
        if getattr(config, field, None) == WINDOW:
            found["wide window"] = {field: CONTEXT}
    if getattr(config, "is_decoder", None) is False:
        found["decoder"] = {"is_decoder": True}
    parameters = getattr(config, "rope_parameters", None) or {}
    for name, (change, also) in _ropes().items():
        if "rope_type" in parameters:
            found[name] = {"rope_parameters": parameters | change | _factors(name, model, ""), **also}
        elif all(isinstance(each, dict) and "rope_type" in each for each in parameters.values()) and parameters:
            layers = {layer: each | change | _factors(name, model, f"{layer}_") for layer, each in parameters.items()}
            found[name] = {"rope_parameters": layers, **also}
    return found


def _ropes() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What each kind of RoPE changes in `rope_parameters`, and elsewhere."""
    original = {"original_max_position_embeddings": BORDER}
    return {
        "linear": ({"rope_type": "linear", "factor": 4.0}, {}),
        "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, {"max_position_embeddings": BORDER}),
        "yarn": ({"rope_type": "yarn", "factor": 4.0, **original}, {}),
        "longrope": ({"rope_type": "longrope", **original}, original),
        "llama3": (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original}, {}
        ),
        "partial": ({"partial_rotary_factor": 0.5}, {}),
    }  # fmt: skip


def _factors(kind: str, model: Any, prefix: str) -> dict[str, Any]:
    """LongRoPE's factors, one for each frequency."""
    count = next((len(b) for name, b in model.named_buffers() if name.endswith(f".{prefix}inv_freq")), 0)
    if kind != "longrope":
        return {}
    return {
        "short_factor": [1.0 + i / 10 for i in range(count)], "long_factor": [2.0 + i for i in range(count)],
        "short_mscale": 1.0, "long_mscale": 1.2,
    }  # fmt: skip


def build(
    family: str, dtype: torch.dtype = torch.float64, attn_implementation: str | None = None, **changes: Any
) -> Any:
    """A model of this configuration with random weights, in eval mode.

    Raises:
        ValueError: it is not tiny.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_of(family, **changes)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > 10_000_000:
            raise ValueError(f"{size:,} parameters")
        options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        model = drawn(lambda: AutoModelForCausalLM.from_config(config, **options), 0)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    return nn.Module.to(model, dtype).eval()


def noisy(family: str, seed: int = 0, **changes: Any) -> Any:
    """In float32 with noise on every parameter: norms begin at one and biases at zero, which would hide mistakes."""
    model, draws = build(family, torch.float32, **changes), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draws))
    return model
