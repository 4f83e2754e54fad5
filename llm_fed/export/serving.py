"""Which exported folders a server of adapters can serve, as far as a folder says it; docs/serving.md has the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from llm_fed.basics.errors import UserError, listed, one_line
from llm_fed.basics.files import read_file
from llm_fed.export.peft_folders import GATE, WEIGHTS
from llm_fed.export.peft_settings import CONFIG
from llm_fed.export.tensors import read_json

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as --max-lora-rank
_UNSERVED = {"modules_to_save": None, "use_dora": False, "target_parameters": None, "bias": "none"}


def line(folders: Sequence[Path]) -> str:
    """Which folders vLLM and LoRAX can serve, and why not the others. UserError: the files of one are damaged."""
    ranks: dict[str, int] = {}
    refused: dict[str, list[str]] = {}
    for folder in folders:
        why, rank = looked_at(folder)
        if why:
            refused.setdefault(why, []).append(folder.name)
        else:
            ranks[folder.name] = rank
    said = [f"not {listed(clients, 5)}: {why}" for why, clients in refused.items()]
    if ranks:
        most = min(rank for rank in VLLM_RANKS if rank >= max(ranks.values()))
        said.insert(0, f"can serve {listed([*ranks], 5)} (vLLM with --max-lora-rank {most})")
    return f"vLLM and LoRAX {'; '.join(said)}; see docs/serving.md"


def looked_at(folder: Path) -> tuple[str, int]:
    """Why a folder cannot be served, or an empty text, and its rank."""
    if (folder / GATE).is_file():
        return "several adapters and a gate, but a server applies one adapter per request", 0
    if not (folder / CONFIG).is_file():
        return "a whole image model", 0
    settings = read_json(folder / CONFIG)
    try:
        rank = int(settings["r"])
        read_file(folder / WEIGHTS, 0, 0)  # safetensors would wait for a pipe
        with safe_open(folder / WEIGHTS, "pt"):
            pass
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, SafetensorError) as error:
        raise UserError(f"the adapter {folder} is damaged ({one_line(str(error))}); export it again") from error
    for key, off in _UNSERVED.items():
        if (value := settings.get(key, off)) not in (off, []):
            return f"{key} is {one_line(json.dumps(value))}", rank
    return f"rank {rank} is above vLLM's {VLLM_RANKS[-1]}" if rank > VLLM_RANKS[-1] else "", rank
