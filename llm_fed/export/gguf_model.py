"""How llama.cpp calls and orders the weights of a model, and what the header of a GGUF file says of it.

The library `gguf` knows the names. The order is llama.cpp's own: its LLaMA rotates neighbouring rows of queries and
keys, where transformers rotates a row of the first half of a head with one of the second. Names and keys are those of
llama.cpp's `convert_hf_to_gguf.py`, and tests/export/test_gguf.py lets llama.cpp answer from such files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llm_fed.basics.errors import UserError, install

if TYPE_CHECKING:
    from gguf import GGUFWriter, TensorNameMap

_ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # by model_type
_ROTARY = {"LLAMA": ("default", "linear", "llama3"), "QWEN2": ("default", "linear"), "QWEN3": ("default", "linear")}
ELSEWHERE = "convert what `llm-fed export --merged` writes with llama.cpp's convert_hf_to_gguf.py"


def library() -> ModuleType:
    """The library that knows the format. UserError: it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(f"GGUF files are written by the library gguf, which is not here; {install('gguf')}") from error
    return gguf


@dataclass(frozen=True)
class Architecture:
    """A model as llama.cpp knows it.

    Attributes:
        config: that of the part of the model that reads text, as transformers has it.
        name: of the architecture, in the library.
        tensors: the library's table from transformers' names to llama.cpp's.
    """

    config: PreTrainedConfig
    name: str
    tensors: TensorNameMap

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Architecture:
        """Raises UserError where llama.cpp would compute something else, or nothing is known of it."""
        gguf, kind = library(), config.model_type
        if kind not in _ARCHITECTURES:
            raise UserError(
                f"GGUF files are written of bases of the families {', '.join(_ARCHITECTURES)}, and this one is of "
                f"{kind}; {ELSEWHERE}"
            )
        name = _ARCHITECTURES[kind]
        rotary = config.rope_parameters["rope_type"]
        if rotary not in _ROTARY[name] or config.hidden_act != "silu":
            raise UserError(
                f"llama.cpp's {name} cannot compute this base: its activation is {config.hidden_act}, and its rotary "
                f"embeddings are of the type {rotary}; {ELSEWHERE}"
            )
        return cls(config, name, gguf.get_tensor_name_map(gguf.MODEL_ARCH[name], config.num_hidden_layers))

    @property
    def file_name(self) -> str:
        """Of the architecture in a file."""
        gguf = library()
        return str(gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[self.name]])

    @property
    def head_size(self) -> int:
        known = self.config.to_dict().get("head_dim")
        return int(known or self.config.hidden_size // self.config.num_attention_heads)

    def named(self, name: str) -> str:
        """llama.cpp's name of a weight or bias. UserError: it has none."""
        found = self.tensors.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f"llama.cpp's {self.name} has no place for {name}; {ELSEWHERE}")
        return str(found)

    def ordered(self, name: str, rows: Tensor) -> Tensor:
        """The rows of a weight, bias or adapter's B in llama.cpp's order: rotated pairs side by side."""
        part = name.split(".")[-2]
        if self.name != "LLAMA" or part not in ("q_proj", "k_proj"):
            return rows
        halves = rows.reshape(-1, 2, self.head_size // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)


def write_header(writer: GGUFWriter, of: Architecture, name: str, rows: int) -> None:
    """The sizes of a base of this `name`, whose embedding has so many `rows`; llama.cpp needs them."""
    gguf, config, rotary = library(), of.config, of.config.rope_parameters
    longest = config.max_position_embeddings
    if window := config.to_dict().get("sliding_window"):  # llama.cpp looks further back, which shows beyond it
        longest = min(longest, window)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(longest)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(of.head_size)
    writer.add_value_length(of.head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(of.head_size)
    writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_vocab_size(rows)
    if rotary["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotary["factor"])


def weights(of: Architecture, model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's name and content of each weight, in float32, but for tied ones, which llama.cpp ties."""
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and of.config.tie_word_embeddings:
            continue
        yield of.named(name), of.ordered(name, tensor).contiguous().numpy()
    if of.config.rope_parameters["rope_type"] == "llama3":
        steps = torch.arange(0, of.head_size, 2, dtype=torch.float32) / of.head_size
        plain = 1.0 / of.config.rope_parameters["rope_theta"] ** steps
        # How many times slower each pair of rows is rotated than without scaling: (head_size / 2,).
        yield "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.float().cpu()).numpy()
