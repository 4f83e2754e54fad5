"""The files of a whole model beside its weights: configuration, decoding, and what belongs to the tokenizer."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from llm_fed.export import older
from llm_fed.models.base import Base
from llm_fed.models.loading import check_name, read_settings
from llm_fed.models.prompt import Prompt
from llm_fed.settings.config import BaseConfig

CONFIG = "config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Files of tokenizers and processors, under the names that transformers and its models' authors give them, and the terms
# of the base, which its weights bring along.
_COPIED = (
    "*token*.json", "*token*.model", "tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "*.bpe", "*bpe*.codes",
    "*spm*.model", "spiece.model", "sentencepiece*", "*.spm", "tekken.json", "*.jinja", "chat_template*",
    "additional_chat_templates/*.jinja", "*processor_config.json", "normalizer.json", "LICENSE*", "NOTICE*",
)  # fmt: skip

# Of what a GenerationConfig has, what belongs to a model as well.
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
_TOKENS |= {"use_cache", "transformers_version"}


def write(folder: Path, base: Base, config: BaseConfig, prompt: Prompt) -> None:
    """Write a model that was made of a base. The tokenizer's files are copies of the base's: transformers would save
    another tokenizer than it has loaded. OSError, SafetensorError: a file cannot be read or written."""
    model = base.model
    model.generation_config = generation_of(base, prompt)  # transformers refuses to save some that it has read
    for key in _decoding(model.config) & vars(model.config).keys():
        delattr(model.config, key)
    model.save_pretrained(folder)
    settings = config_of(model, config)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    generation_of(base, prompt).save_pretrained(folder)
    location = base_folder(base, config)
    for file in sorted({file for pattern in _COPIED for file in location.glob(pattern) if file.is_file()}):
        target = folder / file.relative_to(location)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    path = folder / _TOKENIZER_CONFIG
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
        if (readable := older.tokenizer_settings(known)) != known:
            path.write_text(json.dumps(readable, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def own_settings(base: BaseConfig) -> dict[str, Any]:
    """The config.json of a base, as it stands in its folder or on the Hub."""
    settings, _ = PreTrainedConfig.get_config_dict(check_name(base.name), revision=base.revision)
    return settings


def settings_read(base: BaseConfig) -> dict[str, Any]:
    """What the installed transformers reads in that config.json, with the version that has written it."""
    read = read_settings(check_name(base.name), base.revision).to_dict()
    return read | {"transformers_version": own_settings(base).get("transformers_version")}


def config_of(model: PreTrainedModel, base: BaseConfig) -> dict[str, Any]:
    """A model's config.json: its base's own with what has changed, readable by transformers 4.57, too."""
    config, own = model.config, own_settings(base)
    settings = own if own.get("model_type") == config.model_type else config.to_diff_dict()
    dropped = {*_decoding(config), "auto_map", "task_specific_params"}
    settings = {key: value for key, value in settings.items() if key not in dropped and not key.startswith("_")}
    # A configuration may say that of a class that ties none, and its part for texts may say another thing.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = {"tie_word_embeddings": head is not None and head.weight is embedding.weight}
    settings |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch."), **tied}
    text = config.get_text_config(decoder=True)
    for key, value in settings.items():
        if isinstance(value, dict) and getattr(config, key, None) is text:
            settings[key] = value | tied
    return older.with_older_keys(settings, config)


def _decoding(config: PreTrainedConfig) -> set[str]:
    """Names of settings of decoding, which older models have in their config.json, and which are no model's own."""
    declared = inspect.signature(type(config).__init__).parameters
    return GenerationConfig().to_dict().keys() - _TOKENS - declared.keys()


def generation_of(base: Base, prompt: Prompt) -> GenerationConfig:
    """How the model was scored: greedily, without penalties, up to the tokens that end an answer. What the base's own
    generation_config.json says beside that would change answers."""
    known = base.model.generation_config
    pad = base.tokenizer.pad_token_id if known is None or known.pad_token_id is None else known.pad_token_id
    start = None if known is None else known.bos_token_id
    return GenerationConfig(do_sample=False, eos_token_id=list(prompt.stop), pad_token_id=pad, bos_token_id=start)


def base_folder(base: Base, config: BaseConfig) -> Path:
    """Where the base's files lie; of a Hub model, those of its tokenizer are fetched as far as they are not here."""
    folder = Path(os.path.expanduser(config.name))
    if folder.is_dir():
        return folder
    revision = base.source.revision or config.revision
    return Path(snapshot_download(config.name, revision=revision, allow_patterns=list(_COPIED)))
