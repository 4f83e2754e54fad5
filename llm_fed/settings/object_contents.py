"""What the objects of a Python program hold, as checksums: of a model its tensors, of data their rows, of methods and
metrics their code. So a run is not continued, and a finished one not handed out, for others of the same name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.pool import ThreadPool
from types import CodeType
from typing import Any

from llm_fed.settings import objects

Files = Mapping[str, str]  # as in `contents`: by part of an object, a SHA-256
_AT_ONCE = 8  # tensors that are read at the same time


def of(key: str, name: str) -> Files:
    """Of the object that stands for a name in a configuration."""
    return _KINDS[key](objects.find(key, name))


def _model(given: Any) -> Files:
    """By the names of its tensors, and of the two files that a model in memory has not."""
    model, tokenizer = given if isinstance(given, tuple) else (getattr(given, "model", given), None)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if callable(getattr(tensor, "cpu", None))}
    with ThreadPool(_AT_ONCE) as pool:
        checksums = dict(zip(tensors, pool.map(_tensor, tensors.values(), chunksize=1), strict=True))
    if callable(getattr(getattr(model, "config", None), "to_json_string", None)):
        checksums["config.json"] = _text(model.config.to_json_string())
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        said = json.loads(backend.to_str()) if backend else {"vocab": tokenizer.get_vocab()}
        said |= {"padding": None, "truncation": None, "template": getattr(tokenizer, "chat_template", None)}
        checksums["tokenizer.json"] = _text(json.dumps(said, sort_keys=True))
    return checksums


def _data(task: Any) -> Files:
    return dict(task.checksums())


def _code(thing: Any) -> Files:
    """Of a function, or of the methods of an object or class, without what they call."""
    kind = thing if isinstance(thing, type) else type(thing)
    code = getattr(thing, "__code__", None)
    parts = [code] if code else [own for name in sorted(vars(kind)) if (own := _code_of(vars(kind)[name]))]
    return {getattr(thing, "__name__", kind.__name__): _text("\0".join(map(_said, parts)))}


def _code_of(member: Any) -> CodeType | None:
    return getattr(getattr(member, "__func__", member), "__code__", None)


def _said(code: CodeType) -> str:
    """Of code what it does, wherever it stands."""
    return "\0".join([code.co_code.hex(), repr(code.co_names), *_constants(code)])


def _constants(code: CodeType) -> Iterator[str]:
    for value in code.co_consts:
        if isinstance(value, frozenset):  # whose order differs from process to process
            value = sorted(map(repr, value))
        yield _said(value) if isinstance(value, CodeType) else repr(value)


def _tensor(tensor: Any) -> str:
    import torch  # which most commands do not need

    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def _text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


_KINDS: Mapping[str, Callable[[Any], Files]] = {
    "base.name": _model, "task.name": _data, "method.name": _code, "eval.metric": _code,
}  # fmt: skip
