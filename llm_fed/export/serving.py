"""Whether vLLM and LoRAX can serve an exported folder, by the rules that they document or have in their code.

Only what the folder itself decides is looked at. What depends on the base (which of its layers a server adapts), and
where each rule stands, is in docs/serving.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from llm_fed.basics.documents import load_json
from llm_fed.basics.errors import UserError, one_line
from llm_fed.export.origins import read_origin
from llm_fed.export.peft_folders import GATE, WEIGHTS
from llm_fed.export.peft_settings import CONFIG
from llm_fed.models.origin import Origin

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as --max-lora-rank
_SERVERS = ("vLLM", "LoRAX")
_QUANTIZE = {
    "vLLM": {"nf4": "--quantization bitsandbytes"},
    "LoRAX": {"nf4": "--quantize bitsandbytes-nf4", "int8": "--quantize bitsandbytes"},
}


@dataclass(frozen=True)
class Servable:
    """What becomes of one exported folder at a server."""

    base: str  # the name by which the adapter calls its base
    rank: int
    refused: Mapping[str, str]  # by server why it cannot serve the folder; a server that can is not in it
    loaded: Origin | None = None  # which base, and how it was loaded, if the folder says it

    def options(self, server: str) -> str:
        """What a server is to be given so that the base is the one that the adapter was trained on."""
        if self.loaded is None:
            return ""
        dtype = self.loaded.dtype if server == "vLLM" or self.loaded.dtype != "float32" else None  # LoRAX has none such
        flags = (
            self.loaded.revision and f"--revision {self.loaded.revision}", dtype and f"--dtype {dtype}",
            _QUANTIZE[server].get(self.loaded.quantization or ""),
        )  # fmt: skip
        return "".join(f" {option}" for option in flags if option)


def servable(folder: Path) -> Servable:
    """Which servers can serve a folder that a run has exported.

    Raises:
        UserError: its files are damaged.
    """
    if (folder / GATE).is_file():
        experts = sum(path.is_dir() for path in folder.iterdir())
        return _by_nobody(f"it has {experts} adapters and a gate, but a server applies one adapter per request")
    if not (folder / CONFIG).is_file():
        return _by_nobody("it is a whole image model, but only language models can be served")
    try:
        settings: dict[str, Any] = load_json((folder / CONFIG).read_text(encoding="utf-8"))
        base, rank = str(settings["base_model_name_or_path"] or ""), int(settings["r"])
        with safe_open(folder / WEIGHTS, "pt") as file:
            names = list(file.keys())
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise UserError(f"the adapter {folder} is damaged ({one_line(str(error))}); export it again") from error
    for key, off in (("modules_to_save", None), ("use_dora", False), ("target_parameters", None), ("bias", "none")):
        if (value := settings.get(key, off)) not in (off, []):
            return _by_nobody(f"its {key} is {one_line(json.dumps(value))}, where only {json.dumps(off)} can be served")
    refused = {}
    if rank > VLLM_RANKS[-1]:
        refused["vLLM"] = f"its rank is {rank}, but vLLM's --max-lora-rank is at most {VLLM_RANKS[-1]}"
    loaded = read_origin(folder)
    if loaded and loaded.quantization == "int8":
        refused["vLLM"] = "its base was quantised to int8, which vLLM cannot do when it loads a base"
    if partial := _not_on_each_layer(names):
        refused["LoRAX"] = f"{partial} is adapted in some layers only, and LoRAX would then ignore it in all layers"
    return Servable(base, rank, refused, loaded)


def lines(servable: Mapping[str, Servable]) -> list[str]:
    """Which servers can serve the folders of these clients, in words, and why not the others."""
    said = []
    for server in _SERVERS:
        by_reason: dict[str, list[str]] = {}
        for client, item in servable.items():
            by_reason.setdefault(item.refused.get(server, ""), []).append(client)
        for reason, clients in by_reason.items():
            everybody, one = len(clients) == len(servable) > 1, servable[clients[0]]
            who = f"all {len(servable)} adapters" if everybody else _named(clients)
            if reason:
                none = f"can serve none of the {len(servable)} adapters" if everybody else f"cannot serve {who}"
                said.append(f"{server} {none}: {reason}")
            elif server == "vLLM":
                most = min(rank for rank in VLLM_RANKS if rank >= max(servable[client].rank for client in clients))
                options = f"--enable-lora --max-lora-rank {most} --generation-config vllm{one.options(server)}"
                said.append(f"vLLM can serve {who} on {one.base} with {options}; see docs/serving.md")
            else:
                options = one.options(server)
                said.append(f"{server} can serve {who}" + (f" on {one.base} with{options}" if options else ""))
    return said


def _by_nobody(reason: str) -> Servable:
    return Servable("", 0, dict.fromkeys(_SERVERS, reason))


def _not_on_each_layer(names: Iterable[str]) -> str:
    """The last part of the name of the first linear layer that not every layer of the model has adapted, or nothing.

    How many layers the base has is not known here: they are taken to be as many as the highest number says.
    """
    numbers: dict[str, set[int]] = {}
    for name in names:
        if place := re.search(r"\.(\d+)\.", name):
            numbers.setdefault(f"{name[: place.start()]}.*.{name[place.end() :]}", set()).add(int(place[1]))
    layers = 1 + max((number for each in numbers.values() for number in each), default=-1)
    return next((name.split(".")[-3] for name, each in sorted(numbers.items()) if len(each) < layers), "")


def _named(clients: list[str]) -> str:
    return f"{', '.join(clients[:5])}{f' and {len(clients) - 5} more' if clients[5:] else ''}"
