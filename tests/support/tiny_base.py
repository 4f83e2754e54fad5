"""Tiny bases with a tokenizer, in memory and as folders."""

from __future__ import annotations

from pathlib import Path

import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from llm_fed.models.loading import Base

SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>"}


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per word: <pad> is 0, </s> is 1, then w2, w3, ..."""
    words = ["<pad>", "</s>", *(f"w{i}" for i in range(2, tiny.VOCABULARY))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def around(model: PreTrainedModel, name: str = "tiny", autocast: torch.dtype | None = None) -> Base:
    return Base(model, tokenizer(**SPECIAL), name, model.dtype, autocast)


def folder(path: Path, kind: str = "llama", special: dict[str, str] | None = None, **changes) -> Path:
    """A model folder with safetensors weights and a tokenizer."""
    tiny.build(kind, **changes).save_pretrained(path)
    tokenizer(**SPECIAL if special is None else special).save_pretrained(path)
    return path
