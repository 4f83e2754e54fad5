"""What is given as a base and is none: in which form the model is, and what to give instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llm_fed.basics.documents import load_json
from llm_fed.basics.errors import UserError
from llm_fed.basics.files import read_file

ADAPTER = "adapter_config.json"
_CONVERTED = (  # on it PEFT could not load an adapter either, as that names its base
    "give the folder or Hub id of the model that it was made from, and base.quantization=nf4 to save memory"
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
_ARCHIVES = (".zip", ".gz", ".tar", ".tgz", ".zst", ".7z")
_COUNTS = re.compile(r"(^|_)(n|num)_.*(layer|expert|stage|block)|layers?$|^depths?$")
_MOST_LAYERS, _MOST = 2**12, 2**31
_POINTER = b"version https://git-lfs"
_ABLE = ("bitsandbytes", "mxfp4")  # kinds of quantised weights that adapters can be trained on, or that are unpacked


def check_file(name: str, path: Path) -> None:
    """Refuse a name that is a file, or is written like one.

    Raises:
        UserError: what kind of file, and what to give.
    """
    suffix = path.suffix.lower()
    if not path.is_file():
        if suffix in (".gguf", *_WEIGHTS) and name.count("/") != 1:
            raise UserError(f"base.name={name!r}: there is no such file; and a base is a folder or a Hub id")
        return
    if suffix == ".gguf":
        raise _refused(name, "is a GGUF file, whose weights are rounded for llama.cpp", _CONVERTED)
    if (path.parent / "config.json").is_file():
        raise _refused(name, "is one file of a model", f"give its folder, {path.parent}")
    if (path.parent / ADAPTER).is_file():
        check_folder(name, path.parent)
    if suffix in _WEIGHTS:
        raise _refused(
            name, "is a file of weights alone", "give a folder that also has the model's config.json and tokenizer"
        )
    if suffix in _ARCHIVES:
        raise _refused(name, "is an archive", "unpack it, and give the folder")
    raise _refused(name, "is a file", "give the folder of a model, as save_pretrained writes it")


def check_folder(name: str, folder: Path, weights: bool = True) -> None:
    """Refuse a folder that holds something else than a model as `save_pretrained` writes it.

    Args:
        weights: whether these are needed, and not the tokenizer alone.

    Raises:
        UserError: what it holds, and what to give.
    """
    files = {path.name for path in folder.iterdir()}
    for path in map(folder.joinpath, sorted(files)):
        if path.exists() and not (path.is_file() or path.is_dir()):  # transformers would wait for a pipe
            raise _refused(name, f"has no file in the place of {path.name}", "put the file there, or delete it")
    if ADAPTER in files:
        raise _adapter(name, _read(folder / ADAPTER))
    if "config.json" not in files:
        raise _refused(name, *next(refusal for form in _WITHOUT_CONFIG if (refusal := form(folder, files))))
    config = _read(folder / "config.json")
    check_quantization(name, config)
    packed = config.get("quantization")
    if isinstance(packed, dict) and "bits" in packed:
        raise _refused(name, f"is quantised for MLX ({packed['bits']} bits)", _unquantised("MLX"))
    parts = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    for path in parts if weights else ():
        with open(path, "rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise _refused(name, f"has a pointer of Git LFS in the place of {path.name}", "run git lfs pull there")
    if weights and not parts:
        raise _refused(name, *_without_weights(folder, files))


def check_quantization(name: str, config: Any) -> None:
    """Refuse a model whose weights are quantised in a way in which adapters cannot be trained.

    Args:
        config: of transformers, as an object or as its values.

    Raises:
        UserError: how it is quantised, and what to give.
    """
    values = config if isinstance(config, dict) else config.to_dict()
    kind = (values.get("quantization_config") or {}).get("quant_method")
    if kind is not None and str(kind) not in _ABLE:
        raise _refused(name, f"is quantised with {str(kind).upper()}", _unquantised(str(kind)))


def check_settings(config: Mapping[str, Any]) -> None:
    """Refuse a config.json with more layers, experts or entries than any model has, before one is made of it, or with
    the name of an implementation, whose code transformers would fetch.

    Raises:
        ValueError: which key it is.
    """
    for key, value in config.items():
        if "_implementation" in key and value not in (None, "eager", "sdpa"):
            raise ValueError(f"its config.json says {key}={value!r:.60}, which may be anybody's code; take that out")
        most = _MOST_LAYERS if _COUNTS.search(key) else _MOST
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, Mapping):
                check_settings(number)
            elif type(number) is int and number > most:
                raise ValueError(f"its config.json says {key}={number}, and no model has more than {most:,}")


def check_hub_adapter(name: str, read: Callable[[], str | None]) -> None:
    """Refuse a Hub id that is an adapter.

    Args:
        read: gives the path of the adapter's settings, where the id has some.

    Raises:
        UserError: it is one; which base it has.
    """
    try:
        path = read()
    except (OSError, ValueError):
        return  # what is wrong is said where the model is loaded
    if path is not None:
        raise _adapter(name, _read(Path(path)))


def _refused(name: str, what: str, instead: str) -> UserError:
    return UserError(f"base.name={name!r} {what}; {instead}")


def _unquantised(kind: str) -> str:
    return (
        f"llm_fed trains no adapters on weights of {kind}, so give the model that it was made from, and "
        "base.quantization=nf4 to save memory"
    )


def _adapter(name: str, config: dict[str, Any]) -> UserError:
    base = config.get("base_model_name_or_path")
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


Form = tuple[str, str]  # what it is, and what to give


def _gguf(folder: Path, files: set[str]) -> Form | None:
    names = sorted(name for name in files if name.lower().endswith(".gguf"))
    return (f"holds GGUF ({names[0]}), whose weights are rounded for llama.cpp", _CONVERTED) if names else None


def _run(folder: Path, files: set[str]) -> Form | None:
    if not {"config.yaml", "metrics.jsonl"} <= files:
        return None
    return "is the folder of a run", "its base stands in config.yaml; its adapters are for adapter.start"


def _cache(folder: Path, files: set[str]) -> Form | None:
    if "snapshots" not in files:
        return None
    kept = sorted(path for path in (folder / "snapshots").iterdir() if (path / "config.json").is_file())
    return "is a folder of the Hub's cache", f"give {kept[-1]}" if kept else "download the model again"


def _within(folder: Path, files: set[str]) -> Form | None:
    models = sorted(path for path in folder.iterdir() if (path / "config.json").is_file())
    if not models:
        return None
    return "has no config.json, but folders in it have one", f"give one of them, such as {models[-1]}"


def _other_formats(folder: Path, files: set[str]) -> Form | None:
    kinds = {
        "model_index.json": "a pipeline of diffusers", "params.json": "a checkpoint in its maker's own format",
    }  # fmt: skip
    for name, kind in kinds.items():
        if name in files:
            return f"holds {kind} ({name})", "give the model in the format of transformers (see save_pretrained)"
    return None


def _tokenizer(folder: Path, files: set[str]) -> Form | None:
    if not files & {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}:
        return None
    has = "weights and a tokenizer" if list(folder.glob("*.safetensors")) else "a tokenizer alone"
    return f"holds {has}, but no config.json", "give the folder of the whole model (see save_pretrained)"


def _nothing(folder: Path, files: set[str]) -> Form:
    onnx = _onnx(folder, files)
    return onnx or ("is not a model folder: it has no config.json", "give one, as save_pretrained writes it")


def _onnx(folder: Path, files: set[str]) -> Form | None:
    names = [name for name in sorted(files) if name.endswith(".onnx")]
    names += [f"onnx/{path.name}" for path in sorted(folder.glob("onnx/*.onnx"))]
    if not names:
        return None
    return f"holds ONNX ({names[0]}), which cannot be trained", "give the model that it was exported from"


_WITHOUT_CONFIG = (_gguf, _run, _cache, _within, _other_formats, _tokenizer, _nothing)


def _without_weights(folder: Path, files: set[str]) -> Form:
    """Of a folder with a config.json, but without safetensors."""
    for form in (_gguf, _onnx):
        if refusal := form(folder, files):
            return refusal
    pickled = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth")) and "token" not in name)
    if pickled:
        return (
            f"has its weights as pickle ({pickled[0]}), which can run code when it is read, and not as safetensors",
            "if you trust it, save it anew: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    others = sorted(name for name in files if name in ("tf_model.h5", "flax_model.msgpack"))
    if others:
        return f"has no weights for PyTorch, only {others[0]}", "give a folder with safetensors"
    return "has no weights (no .safetensors file)", "give the folder of the whole model (see save_pretrained)"
