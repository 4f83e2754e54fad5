"""Whether the weights of a base fit into what a container or a job allows, before they are loaded."""

from __future__ import annotations

import math

from safetensors import SafetensorError, safe_open

from llm_fed.basics import cgroups
from llm_fed.settings.config import BaseConfig
from llm_fed.settings.paths import base_folder

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def shortage(config: BaseConfig, device: str) -> str:
    """What is too little, in words, for a base on the CPU; empty where the weights fit, and where no limit is known.

    Without a limit the system may swap, but a process over its limit is killed without a message.

    Args:
        config: with a dtype other than `auto`.
    """
    free, limit = cgroups.free_memory()
    folder = base_folder(config.name, config.revision)
    if limit is None or device != "cpu" or config.quantization or folder is None:
        return ""
    try:
        numbers = sum(_numbers(str(path)) for path in folder.glob("*.safetensors"))
    except (OSError, SafetensorError):  # loading says what is wrong
        return ""
    size = numbers * _BYTES[config.dtype]
    if size <= free:
        return ""
    half = ", or base.dtype=bfloat16 where half of it suffices" if config.dtype == "float32" else ""
    return (
        f"the base takes {size / 1e9:.2f} GB in {config.dtype}, but {limit.name} leaves {free / 1e9:.2f} GB, so the "
        f"kernel may kill this run without a message; it needs more memory, or a smaller base{half}"
    )


def _numbers(path: str) -> int:
    """How many numbers the tensors of a file have; only its header is read."""
    with safe_open(path, framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
