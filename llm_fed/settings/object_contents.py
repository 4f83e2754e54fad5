"""What objects and code of a user's own hold, as checksums by value: of a model its tensors and modules, of data their
rows, of all else code and state. So a run is not continued, and a finished one not handed out, for others of the same
name."""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import json
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.pool import ThreadPool
from typing import Any

Files = Mapping[str, str]  # as in `contents`: by part of an object, a SHA-256
UNKNOWN = "unknown: "  # what a checksum begins with where there is none; the reason follows
_AT_ONCE = 8  # tensors that are read at the same time
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_CONSTANTS = (str, bytes, complex, tuple, frozenset, slice, types.CodeType)  # equal ones may be one object or several
_PLAIN = (str, int, float, bool, bytes, dict, list, tuple, type(None))
_DERIVED = {  # of a class: what says nothing of what it does, or follows from the rest
    "__abstractmethods__", "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__orig_bases__",
    "__parameters__", "__slotnames__", "__static_attributes__", "__weakref__", "_abc_impl",
}  # fmt: skip


def of_object(key: str, thing: Any) -> Files:
    """Of the object that stands for a name in a configuration."""
    return _KINDS[key](thing) if key in _KINDS else of_code(thing)


def of_code(thing: Any) -> Files:
    """Of a function, a class or an object: its code and state, with all of the user's own that they refer to."""
    named = thing if isinstance(thing, type | types.FunctionType) else type(thing)
    return {named.__name__: digest(thing)}


def digest(thing: Any, root: Any = None) -> str:
    """SHA-256 of a thing by value, whatever it is, as a part of `root`; `UNKNOWN` and why where a part of it has no
    value that can be read, as of a lock or an open file."""
    try:
        values = _Values(thing if root is None else root)
        values.dump(thing)
        return values.hash.hexdigest()
    except Exception as error:  # of any kind: its classes say how it is taken apart
        return f"{UNKNOWN}{' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"


class _Values(pickle._Pickler):
    """Feeds a hash with what pickle writes of things, but for what pickle knows by its name alone and for sets. `root`:
    whose module is the user's own, wherever it is installed."""

    def __init__(self, root: Any):
        self.hash = hashlib.sha256()
        super().__init__(types.SimpleNamespace(write=self.hash.update), protocol=4)
        self.taken: set[tuple[str, str]] = set()  # module and name
        kind = root if isinstance(root, type | types.FunctionType) else type(root)
        self.root, self._module = root, kind.__module__

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        known = type(obj) in _PLAIN or id(obj) in self.memo  # type: ignore[attr-defined]
        parts = None if known else _parts(obj, self)
        if parts is None:
            super().save(obj, save_persistent_id)  # type: ignore[misc]
            return
        self.memoize(obj)
        self.save(type(obj).__qualname__)
        for part in parts:
            self.save(part)

    def memoize(self, obj: Any) -> None:
        if type(obj) not in _CONSTANTS:
            super().memoize(obj)  # type: ignore[misc]

    def is_others(self, thing: type | types.FunctionType) -> bool:
        """Whether a class or function is of no module of the user's own, and found under its name there."""
        if thing is self.root or self.is_own(thing.__module__ or ""):
            return False
        try:
            return bool(pickle.dumps(thing))
        except (pickle.PicklingError, AttributeError):
            return False

    def is_own(self, module: str) -> bool:
        """Whether a module is the user's: that of the root, or neither Python's, nor ours, nor installed."""
        top = module.partition(".")[0]
        if top == "__main__":
            return True
        spec = None if top in {*sys.stdlib_module_names, __name__.partition(".")[0]} else _spec(top)
        locations = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        return any(locations) and (
            module == self._module or not any(location.startswith(_LIBRARIES) for location in locations)
        )


@functools.singledispatch
def _parts(thing: Any, values: _Values) -> Iterable[Any] | None:
    """What is saved instead of a thing; None: what pickle makes of it."""
    import torch  # which most commands do not need

    if isinstance(thing, torch.Tensor):
        return str(thing.dtype), tuple(thing.shape), bytes(_bytes(thing))
    if isinstance(thing, torch.nn.Module):
        return type(thing), thing._parameters, thing._buffers, thing._modules, _attributes(thing)
    return None


@_parts.register
def _(thing: type, values: _Values) -> Iterable[Any] | None:
    if values.is_others(thing):
        return None
    slots = types.GetSetDescriptorType, types.MemberDescriptorType
    members = {name: value for name, value in sorted(vars(thing).items()) if not isinstance(value, slots)}
    return thing.__qualname__, thing.__bases__, {name: members[name] for name in members if name not in _DERIVED}


def _function(function: types.FunctionType, values: _Values) -> Iterator[Any]:
    yield from (function.__code__, function.__defaults__, function.__kwdefaults__, vars(function))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "an empty cell"
    names, every = _names(function.__code__), function.__globals__
    for name in names:
        if name in every:
            yield from _named(name, every[name], names, values)
    for name in _imports(function.__code__, str(every.get("__package__") or "")):
        if values.is_own(name):
            yield from _named(name, importlib.import_module(name), names, values)


def _named(name: str, value: Any, names: Sequence[str], values: _Values) -> Iterator[Any]:
    """What a name stands for; of a module of the user's own what is taken from it by these names."""
    yield from (name, value)
    if isinstance(value, types.ModuleType) and values.is_own(value.__name__):
        for inner in names:
            if inner in vars(value) and (value.__name__, inner) not in values.taken:
                values.taken.add((value.__name__, inner))
                yield from _named(inner, vars(value)[inner], names, values)


@_parts.register
def _(thing: types.CodeType, values: _Values) -> Iterable[Any]:
    arguments = thing.co_varnames[: thing.co_argcount + thing.co_kwonlyargcount]
    counts = thing.co_argcount, thing.co_posonlyargcount, thing.co_flags
    return thing.co_code, thing.co_exceptiontable, thing.co_names, arguments, counts, thing.co_consts


# The order of a set differs from process to process; a method's name may stand for another function in its class.
_parts.register(set | frozenset, lambda own, values: [type(own), _known(own, values.root), getattr(own, "__dict__", 0)])
_parts.register(types.MethodType, lambda own, values: [own.__func__, own.__self__])
_parts.register(types.FunctionType, lambda own, values: None if values.is_others(own) else _function(own, values))
_parts.register(types.ModuleType, lambda module, values: [module.__name__])
_parts.register(types.MappingProxyType, lambda proxy, values: [dict(proxy)])
_parts.register(property, lambda own, values: [own.fget, own.fset, own.fdel])
_parts.register(staticmethod | classmethod, lambda own, values: [own.__func__])
_parts.register(functools.cached_property, lambda own, values: [own.func])
_parts.register(functools._lru_cache_wrapper, lambda own, values: None if values.is_others(own) else [own.__wrapped__])


def _known(things: Iterable[Any], root: Any) -> list[str]:
    """The checksums of parts, in order; ValueError where one has none."""
    found = sorted(digest(thing, root) for thing in things)
    if found and found[-1].startswith(UNKNOWN):  # which is behind all digits
        raise ValueError(found[-1].removeprefix(UNKNOWN))
    return found


def _names(code: types.CodeType) -> list[str]:
    """Of what stands outside, with those of the functions within."""
    inner = (name for value in code.co_consts if isinstance(value, types.CodeType) for name in _names(value))
    return sorted({*code.co_names, *inner})


def _imports(code: types.CodeType, package: str) -> Iterator[str]:
    """The modules that a function imports when it is called."""
    instructions = list(dis.get_instructions(code))
    for level, names, each in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if each.opname == "IMPORT_NAME":
            module = importlib.util.resolve_name("." * level.argval + each.argval, package)
            requested = [module, *(f"{module}.{name}" for name in names.argval or ())]
            yield from (name for name in requested if _spec(name) is not None)
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _imports(value, package)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its package is a module; it was made by hand
        return None


def _attributes(module: Any) -> dict[str, Any]:
    """What a module has beside what every one has, such as hooks, and whether it is being trained."""
    import torch

    usual = vars(torch.nn.Module()).keys()
    return {name: value for name, value in sorted(vars(module).items()) if name not in usual}


def _model(given: Any) -> Files:
    """By the names of its tensors, and of the files that a model in memory has not."""
    import torch
    from transformers import PreTrainedTokenizerFast

    alone = given if isinstance(given, torch.nn.Module | tuple) else given.model  # of a kind of a user's own
    model, tokenizer = alone if isinstance(alone, tuple) else (alone, None)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    with ThreadPool(_AT_ONCE) as pool:
        hashed = pool.map(lambda own: hashlib.sha256(_bytes(own)).hexdigest(), tensors.values(), chunksize=1)
    checksums = dict(zip(tensors, hashed, strict=True))
    checksums["modules"] = digest([(name, type(module), _said(module)) for name, module in model.named_modules()])
    if hasattr(getattr(model, "config", None), "to_json_string"):  # also of a module around one of transformers
        checksums["config.json"] = digest(model.config.to_json_string())
    if tokenizer is not None:
        is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
        said = json.loads(tokenizer.backend_tokenizer.to_str()) if is_fast else {"vocab": tokenizer.get_vocab()}
        said |= {"padding": None, "truncation": None, "template": tokenizer.chat_template}
        checksums["tokenizer.json"] = digest(json.dumps(said, sort_keys=True))
    return checksums


def _said(module: Any) -> dict[str, Any]:
    """What a module of a model says beside its tensors; of transformers' own that is their config."""
    if type(module).__module__.startswith("transformers."):
        return {}
    return {name: value for name, value in _attributes(module).items() if not hasattr(value, "to_json_string")}


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


_KINDS: Mapping[str, Callable[[Any], Files]] = {"base.name": _model, "task.name": lambda task: dict(task.checksums())}
