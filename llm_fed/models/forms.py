"""What is given as a base and is none: what it is, and what to give instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fed.basics.documents import load_json
from llm_fed.basics.errors import UserError
from llm_fed.basics.files import read_file

ADAPTER = "adapter_config.json"
_SAVED = "give the folder of a model, as save_pretrained writes it"
_ORIGINAL = "give the model that it was made from, and base.quantization=nf4 to save memory"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_COUNTS = re.compile(r"(^|_)(n|num)_.*(layer|expert|stage|block)|layers?$|^depths?$")
_MOST_LAYERS, _MOST = 2**12, 2**31
_POINTER = b"version https://git-lfs"
_ABLE = ("bitsandbytes", "mxfp4")  # kinds of quantised weights that adapters can be trained on, or that are unpacked


def check_file(name: str, path: Path) -> None:
    """Refuse a name that is a file, or is written like one of weights. UserError: what to give."""
    if not path.is_file():
        if path.suffix.lower() in _WEIGHTS and name.count("/") != 1:
            raise UserError(f"base.name={name!r}: there is no such file; and a base is a folder or a Hub id")
        return
    if path.suffix.lower() == ".gguf":
        raise _refused(name, "is a GGUF file, whose weights are rounded for llama.cpp", _ORIGINAL)
    if (path.parent / ADAPTER).is_file():
        check_folder(name, path.parent)
    whole = (path.parent / "config.json").is_file()
    raise _refused(name, "is a file", f"give its folder, {path.parent}" if whole else _SAVED)


def check_folder(name: str, folder: Path, weights: bool = True) -> None:
    """Refuse a folder that holds something else than a model as `save_pretrained` writes it; without `weights` a
    tokenizer suffices. UserError: what it holds, and what to give."""
    files = sorted(path.name for path in folder.iterdir())
    for path in map(folder.joinpath, files):
        if path.exists() and not (path.is_file() or path.is_dir()):  # transformers would wait for a pipe
            raise _refused(name, f"has no file in the place of {path.name}", "put the file there, or delete it")
    if ADAPTER in files:
        raise adapter(name, folder / ADAPTER)
    parts = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    if not parts and (packed := [file for file in files if file.endswith(".gguf")]):
        raise _refused(name, f"holds GGUF ({packed[0]}), whose weights are rounded for llama.cpp", _ORIGINAL)
    if "config.json" not in files:
        if {"config.yaml", "metrics.jsonl"} <= {*files}:
            raise _refused(name, "is a run's folder", "its base is in config.yaml, and adapter.start takes it")
        within = sorted([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")])
        raise _refused(name, "has no config.json", f"give {within[-1].parent}, which has one" if within else _SAVED)
    check_quantization(name, _read(folder / "config.json"))
    for path in parts if weights else ():
        with open(path, "rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise _refused(name, f"has a pointer of Git LFS in the place of {path.name}", "run git lfs pull there")
    if weights and not parts:
        raise _refused(
            name, "has no weights as safetensors",
            f"{_SAVED}; pickled ones, which can run code when they are read, are saved anew by "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )  # fmt: skip


def check_quantization(name: str, values: Mapping[str, Any]) -> None:
    """Refuse a model whose weights are quantised in a way in which adapters cannot be trained. `values`: of its
    config.json. UserError: how it is quantised, and what to give."""
    kind = (values.get("quantization_config") or {}).get("quant_method")
    if kind is None and isinstance(values.get("quantization"), dict):
        kind = "mlx"
    if kind is not None and str(kind) not in _ABLE:
        raise _refused(name, f"is quantised with {str(kind).upper()}, on which no adapters are trained", _ORIGINAL)


def check_settings(config: Mapping[str, Any]) -> None:
    """Refuse a config.json with more layers, experts or entries than any model has, before one is made of it, or with
    the name of an implementation, whose code transformers would fetch. ValueError: which key it is."""
    for key, value in config.items():
        if "_implementation" in key and value not in (None, "eager", "sdpa"):
            raise ValueError(f"its config.json says {key}={value!r:.60}, which may be anybody's code; take that out")
        most = _MOST_LAYERS if _COUNTS.search(key) else _MOST
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, Mapping):
                check_settings(number)
            elif type(number) is int and number > most:
                raise ValueError(f"its config.json says {key}={number}, and no model has more than {most:,}")


def _refused(name: str, what: str, instead: str) -> UserError:
    return UserError(f"base.name={name!r} {what}; {instead}")


def adapter(name: str, path: Path) -> UserError:
    """The error of a base that is an adapter with these settings."""
    base = _read(path).get("base_model_name_or_path")
    whose = f" of the base {base!r}" if base else ""
    return _refused(
        name, f"is a PEFT adapter{whose} and no base",
        f"give base.name={base or 'its base'}, and the adapter as adapter.start (--adapter for eval and chat)",
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is damaged, which transformers says best."""
    try:
        content = load_json(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
