"""Small runs whose passes are forced by `engine.*`: what they record, and how far apart two of them end."""

import torch
from safetensors.torch import load_file

from llm_fed.runs.records import read_records

CHANGES = {
    "rounds": 3,
    "local": {"steps": 4, "lr": 0.01, "lr_end": 0.01},
    "eval": {"every": 0},
    "report": {"samples": 0},
}


def passes(folder) -> list[dict[str, int]]:
    return [line["passes"] for line in read_records(folder / "timing.jsonl") if "passes" in line]


def adapters(folder) -> dict[str, dict[str, torch.Tensor]]:
    return {path.parent.name: load_file(path) for path in sorted(folder.glob("adapters/*/*.safetensors"))}


def apart(one, other) -> float:
    pairs = [(tensors[name], other[client][name]) for client, tensors in one.items() for name in tensors]
    return max(float((a - b).abs().max()) for a, b in pairs)
