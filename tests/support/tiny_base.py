"""Tiny bases with a tokenizer, in memory and as folders."""

from pathlib import Path

import tiny

from llm_fed.testing.tiny import SPECIAL, language_base, tokenizer

around = language_base


def folder(path: Path, kind: str = "llama", special: dict[str, str] | None = None, **changes) -> Path:
    """A model folder with safetensors weights and a tokenizer."""
    tiny.build(kind, **changes).save_pretrained(path)
    tokenizer(**SPECIAL if special is None else special).save_pretrained(path)
    return path
