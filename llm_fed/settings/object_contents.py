"""What objects and code of a user's own hold, as checksums by value: of a model its tensors and modules, of data their
rows, of all else code and state. So a run is not continued, and a finished one not handed out, for others of the same
name."""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import importlib.util
import json
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np

Files = Mapping[str, str]  # as in `contents`: by part of an object, a SHA-256
UNKNOWN = "unknown: "  # what a checksum begins with where there is none; the reason follows
_AT_ONCE = 8  # tensors that are read at the same time
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)
_DERIVED = {  # of a class: what says nothing of what it does, or follows from the rest
    "__abstractmethods__", "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__orig_bases__",
    "__parameters__", "__slotnames__", "__static_attributes__", "__weakref__", "_abc_impl",
}  # fmt: skip
_C_MEMBERS = (
    types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
    types.MethodWrapperType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip


def of_object(key: str, thing: Any) -> Files:
    """Of the object that stands for a name in a configuration."""
    return _KINDS[key](thing) if key in _KINDS else of_code(thing)


def of_code(thing: Any) -> Files:
    """Of a function, a class or an object: its code and state, with all of the user's own that they refer to."""
    return {str(getattr(thing, "__name__", type(thing).__name__)): digest(thing)}


def digest(thing: Any) -> str:
    """SHA-256 of a thing by value, whatever it is; `UNKNOWN` and why where a part of it has no value that can be read,
    as of a lock or an open file."""
    try:
        values = _Values(thing)
        values.add(thing)
        return values.hash.hexdigest()
    except Exception as error:  # of any kind: its classes say how it is taken apart
        return f"{UNKNOWN}{' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"


class _Values:
    """Feeds a hash with what things say. What stands in modules of others counts by its name, as for pickle.

    Args:
        root: whose module is the user's own, wherever it is installed.
    """

    def __init__(self, root: Any):
        self.hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no number of `_seen` is given twice
        self._taken: set[tuple[str, str]] = set()  # module and name
        kind = root if hasattr(root, "__qualname__") else type(root)
        self._root = root, getattr(kind, "__module__", None) or ""

    def add(self, thing: Any) -> None:
        kind = type(thing)
        self._say(kind.__qualname__)
        if kind in _PLAIN:
            self._say(repr(thing))
        elif kind in (tuple, frozenset, types.CodeType):  # constants, which may be one object or several
            self._add_new(thing)
        elif id(thing) in self._seen:
            self._say(f"again {self._seen[id(thing)]}")
        else:
            self._seen[id(thing)] = len(self._kept)
            self._kept.append(thing)
            self._add_new(thing)

    def add_all(self, things: Iterable[Any]) -> None:
        for thing in things:
            self.add(thing)
        self._say("end")

    def _say(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.hash.update(len(data).to_bytes(8, "little") + data)

    def _add_new(self, thing: Any) -> None:
        if type(thing) in (list, tuple):
            self.add_all(thing)
        elif type(thing) in (dict, types.MappingProxyType):
            self.add_all(part for item in thing.items() for part in item)
        elif type(thing) in (set, frozenset):  # their order differs from process to process
            self.add_all(sorted(map(_known, thing)))
        elif isinstance(getattr(thing, "__qualname__", None), str) and self._is_others(thing):
            self._say(f"{thing.__module__}:{thing.__qualname__}")
        elif isinstance(thing, type):
            self.add_all([thing.__qualname__, thing.__bases__])
            self.add({name: value for name, value in sorted(vars(thing).items()) if name not in _DERIVED})
        elif isinstance(thing, _C_MEMBERS):
            own = getattr(thing, "__self__", None)
            self.add_all([getattr(thing, "__module__", None), thing.__qualname__])
            self.add(None if isinstance(own, types.ModuleType) else own)
        else:
            add = next((add for kind, add in _ADD.items() if isinstance(thing, kind)), _Values._add_object)
            add(self, thing)

    def _add_object(self, thing: Any) -> None:
        import torch  # which most commands do not need

        self.add(type(thing))
        if isinstance(thing, torch.Tensor):
            self.add_all([str(thing.dtype), tuple(thing.shape)])
            self.hash.update(_bytes(thing))
        elif isinstance(thing, torch.nn.Module):
            self.add_all([thing._parameters, thing._buffers, thing._modules, _attributes(thing)])
        else:
            reduce = copyreg.dispatch_table.get(type(thing))
            parts = reduce(thing) if reduce else thing.__reduce_ex__(4)
            self.add(parts if isinstance(parts, str) else [list(p) if isinstance(p, Iterator) else p for p in parts])
            if not self._is_others(type(thing)):  # some leave out of the above what they have
                self.add(getattr(thing, "__dict__", None))

    def _add_array(self, array: np.ndarray) -> None:
        self.add_all([array.dtype.str, array.shape])
        if array.dtype.hasobject:
            self.add_all(array.ravel().tolist())
        else:
            self.hash.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _add_function(self, function: types.FunctionType) -> None:
        self.add_all([function.__code__, function.__defaults__, function.__kwdefaults__, vars(function)])
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:
                self._say("an empty cell")
        names, every = _names(function.__code__), function.__globals__
        for name in names:
            if name in every:
                self._add_named(name, every[name], names)
        for name in _imports(function.__code__, str(every.get("__package__") or "")):
            if self._is_own(name):
                self._add_named(name, importlib.import_module(name), names)

    def _add_named(self, name: str, value: Any, names: Sequence[str]) -> None:
        """What a name stands for; of a module of the user's own what is taken from it by these names."""
        self._say(name)
        self.add(value)
        if isinstance(value, types.ModuleType) and self._is_own(value.__name__):
            for inner in names:
                if inner in vars(value) and (value.__name__, inner) not in self._taken:
                    self._taken.add((value.__name__, inner))
                    self._add_named(inner, vars(value)[inner], names)

    def _add_code(self, code: types.CodeType) -> None:
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.add((code.co_code, code.co_exceptiontable, code.co_names, arguments, code.co_flags))
        self.add((code.co_argcount, code.co_posonlyargcount, code.co_consts))

    def _is_others(self, thing: Any) -> bool:
        """Whether a class or function is of no module of the user's own, and found under its name there."""
        module = str(getattr(thing, "__module__", None))
        if thing is self._root[0] or self._is_own(module):
            return False
        found: Any = sys.modules.get(module)
        for part in thing.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is thing

    def _is_own(self, module: str) -> bool:
        """Whether a module is the user's: that of the root, or neither Python's, nor ours, nor installed."""
        top = module.partition(".")[0]
        if top == "__main__":
            return True
        spec = None if top in {*sys.stdlib_module_names, __name__.partition(".")[0]} else _spec(top)
        locations = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        return any(locations) and (
            module == self._root[1] or not any(location.startswith(_LIBRARIES) for location in locations)
        )


# What is taken apart in its own way, by kind; all else as `copy` and pickle would.
_ADD: Mapping[type, Callable[[_Values, Any], None]] = {
    types.CodeType: _Values._add_code,
    types.FunctionType: _Values._add_function,
    np.ndarray: _Values._add_array,
    types.ModuleType: lambda values, module: values.add(module.__name__),
    types.MethodType: lambda values, method: values.add_all([method.__func__, method.__self__]),
    property: lambda values, own: values.add_all([own.fget, own.fset, own.fdel]),
    staticmethod: lambda values, own: values.add(own.__func__),
    classmethod: lambda values, own: values.add(own.__func__),
    functools.cached_property: lambda values, own: values.add(own.func),
    functools._lru_cache_wrapper: lambda values, own: values.add(own.__wrapped__),
}


def _known(thing: Any) -> str:
    """The checksum of a part; ValueError where it has none."""
    if (found := digest(thing)).startswith(UNKNOWN):
        raise ValueError(found.removeprefix(UNKNOWN))
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
    model, tokenizer = given if isinstance(given, tuple) else (getattr(given, "model", given), None)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if callable(getattr(tensor, "cpu", None))}
    with ThreadPool(_AT_ONCE) as pool:
        checksums = dict(zip(tensors, pool.map(_tensor, tensors.values(), chunksize=1), strict=True))
    checksums["modules"] = digest([(name, type(module), _said(module)) for name, module in model.named_modules()])
    if callable(getattr(getattr(model, "config", None), "to_json_string", None)):
        checksums["config.json"] = digest(model.config.to_json_string())
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        said = json.loads(backend.to_str()) if backend else {"vocab": tokenizer.get_vocab()}
        said |= {"padding": None, "truncation": None, "template": getattr(tokenizer, "chat_template", None)}
        checksums["tokenizer.json"] = digest(json.dumps(said, sort_keys=True))
    return checksums


def _said(module: Any) -> dict[str, Any]:
    """What a module of a model says beside its tensors; of transformers' own that is their config."""
    if type(module).__module__.startswith("transformers."):
        return {}
    return {name: value for name, value in _attributes(module).items() if name not in ("config", "generation_config")}


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _tensor(tensor: Any) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()


_KINDS: Mapping[str, Callable[[Any], Files]] = {"base.name": _model, "task.name": lambda task: dict(task.checksums())}
