"""GGUF files for llama.cpp and Ollama: adapters as its LoRA, and whole models."""

from __future__ import annotations

import tempfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from llm_fed.basics.errors import RunError, UserError
from llm_fed.export import gguf_tokens, peft_folders, proof
from llm_fed.export.gguf_model import Architecture, library, weights, write_header
from llm_fed.export.model_files import generation_of
from llm_fed.kinds.language import Language
from llm_fed.models.base import Base, freeze
from llm_fed.models.lora import targets
from llm_fed.models.prompt import Prompt
from llm_fed.state import pair

if TYPE_CHECKING:
    from gguf import GGUFWriter

ADAPTER, MODEL, BASE = "adapter.gguf", "model.gguf", "base.gguf"


def adapter(folder: Path, base: Base) -> bytes:
    """A client's PEFT adapter as a LoRA of llama.cpp, in float32. `base`: whose weights are not looked at, so that they
    may be those of `torch.device("meta")`. UserError: it is not one adapter, or it adapts what llama.cpp cannot."""
    peft_folders.check_one(folder, "and llama.cpp adds adapters with fixed weights; leave out --gguf")
    config = base.model.config.get_text_config()
    state, structure = peft_folders.read(folder, base)
    if structure.dora or structure.parameters:
        what = "lengths of outputs (DoRA)" if structure.dora else "the experts of a mixture"
        raise UserError(f"{folder} adapts {what}, which llama.cpp's adapters do not have; give --merged --gguf")
    gguf, of = library(), Architecture.of(config)
    with tempfile.TemporaryDirectory() as location:
        path = Path(location) / ADAPTER
        writer = gguf.GGUFWriter(path, of.file_name)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, structure.alpha)
        for name in targets(base.model, structure):
            if name == "lm_head" and config.tie_word_embeddings:
                raise UserError(
                    f"{folder} adapts the head, whose weights are the embedding's in this base, and llama.cpp would "
                    "adapt both; give --merged --gguf"
                )
            first, second = pair(name, "")
            weight = f"{name}.weight"
            ordered = of.ordered(weight, state[second].float())
            writer.add_tensor(f"{of.named(weight)}.lora_a", state[first].float().contiguous().numpy())
            writer.add_tensor(f"{of.named(weight)}.lora_b", ordered.contiguous().numpy())
        _save(writer)
        return path.read_bytes()


def model(path: Path, base: Base, prompt: Prompt) -> None:
    """A base's model, which is in float32 and asked by this prompt, as one file. UserError: llama.cpp does not know
    such a model or tokenizer. OSError: the file cannot be written."""
    gguf, config = library(), base.model.config.get_text_config()
    of = Architecture.of(config)
    writer = gguf.GGUFWriter(path, of.file_name)
    write_header(writer, of, Path(base.source.name).name, base.rows)
    gguf_tokens.write(writer, base.tokenizer, base.rows, prompt)
    for name, content in weights(of, base.model):
        writer.add_tensor(name, content)
    _save(writer)


def _save(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(path: Path, probed: proof.Probe, base: Base, config: PreTrainedConfig, prompt: Prompt) -> None:
    """Refuse a file with a model of this `config` whose weights, as transformers reads them, do not compute what was
    probed of the base, of which only tokenizer and dtype are looked at. RunError: what differs."""
    known = config
    if config.model_type == "mistral":  # transformers takes the file for the LLaMA that it says it is
        same = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
        known = LlamaConfig(**same)
    try:
        with redirect_stderr(StringIO()):  # its bar of progress
            loaded = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, config=known, dtype=base.dtype, local_files_only=True
            )
        if known is not config:
            weights_of_file, loaded = loaded.state_dict(), AutoModelForCausalLM.from_config(config, dtype=base.dtype)
            loaded.load_state_dict(weights_of_file)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise RunError(f"the GGUF file cannot be loaded: {error}") from error
    freeze(loaded)
    whole = Language(
        model=loaded, tokenizer=base.tokenizer, name=base.name, dtype=base.dtype, autocast=base.autocast, prompt=prompt
    )
    loaded.generation_config = generation_of(whole, prompt)
    proof.compare(whole, probed, prompt)
