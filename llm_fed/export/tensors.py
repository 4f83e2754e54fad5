"""Safetensors files that are handed out: their metadata holds a checksum, of the settings beside them, too.

Stock readers (PEFT, transformers) ignore it. Files without one, of strangers and of older versions, are taken as they
are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from llm_fed.basics import checksum
from llm_fed.basics.documents import Json, load_json
from llm_fed.basics.errors import UserError, one_line
from llm_fed.basics.files import read_file

_SETTINGS = "settings"
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], settings: Mapping[str, Json] = {}) -> bytes:
    """A safetensors file with these metadata, a checksum, and one of the `settings` in files beside it."""
    known = {"format": "pt", **metadata}
    if settings:
        known[_SETTINGS] = checksum.of(settings)
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata=known)
    return _with_metadata(data, {**known, checksum.KEY: _digest(data, known)})


def read_json(path: Path, advice: str = "export it again") -> dict[str, Any]:
    """The object in a JSON file beside them. UserError: it is absent or damaged; `advice` says what to do."""
    try:
        values = load_json(read_file(path))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is absent or damaged ({one_line(str(error))}); {advice}") from error


def load(path: Path, advice: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata. UserError: it is absent or damaged; `advice` says what to do."""
    try:
        read_file(path, 0, 0)  # safetensors would wait for a pipe
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            expected = metadata.pop(checksum.KEY, None)
            if expected is not None and _digest(read_file(path), metadata) != expected:
                raise checksum.ChecksumError("it does not match its checksum")
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is absent, damaged or cut short ({one_line(str(error))}); {advice}") from error


def in_one_dtype(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors of a file in the one dtype of at least float32 that holds them all. UserError: one of them is no
    float, or of a kind that nothing is trained in."""
    dtype = torch.float32
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise UserError(
                f"{path}: {one_line(name)} is {tensor.dtype}; weights are float32, float64, float16 or bfloat16"
            )
        dtype = torch.promote_types(dtype, tensor.dtype)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def check_settings(metadata: Mapping[str, str], settings: Mapping[str, Json], path: Path) -> None:
    """Refuse settings for which the tensors were not written. UserError: `path`, which says them, was changed."""
    if metadata.get(_SETTINGS, expected := checksum.of(settings)) != expected:
        raise UserError(f"{path} is damaged: it is not what was written with the weights; export the model again")


def _digest(data: bytes, metadata: Mapping[str, str]) -> str:
    """The SHA-256 of a safetensors file with these metadata, whatever their order."""
    return hashlib.sha256(_with_metadata(data, metadata)).hexdigest()


def _with_metadata(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """The same safetensors file with these metadata, sorted: safetensors' own order changes from call to call."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + data[end:]
