"""Requests and their results as bytes between the processes of one launch: messages of `wire`, hence no pickle.

Beyond what a message may hold, dataclasses of this package travel by their fields, its functions (losses, say) by
their names, and its errors by their texts. So do those of the package of the run's method, where that is from outside:
all processes of a launch are one user's. No other name is ever looked up. Whatever both sides have anyway, such as the
examples of all sites, is replaced by its number, and tensors of equal content travel once.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.method.requests import Query
from llm_fed.method.site import Site
from llm_fed.state import Layout, State, wire

Tensors = dict[object, tuple[int, Tensor]]  # by their bits
_PACKAGE = __name__.partition(".")[0]


def examples_of(sites: Iterable[Site]) -> list[object]:
    """What the requests of these sites refer to, in an order that depends on the sites alone."""
    examples: list[object] = []
    for site in sites:
        for items in (site.train, site.data.held_out, *site.data.queries.values()):
            for item in items:
                examples += [item, item.prompt] if isinstance(item, Query) else [item]
    return examples


def fingerprint(examples: Iterable[object], model: nn.Module | None = None) -> str:
    """Of the examples, and of the first weights of every layer of `model`; equal where both are."""
    digest = hashlib.blake2b(digest_size=8)
    for item in examples:
        digest.update(repr(item).encode())
        if isinstance(pixels := getattr(item, "pixels", None), Tensor):
            digest.update(pixels.cpu().numpy().tobytes())
    for parameter in model.parameters() if model else ():
        digest.update(parameter.detach().flatten()[:8].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def packages_of(*things: Any) -> tuple[str, ...]:
    """The packages from outside whose classes those of a method and a base are made of."""
    packages = {kind.__module__.partition(".")[0] for thing in things for kind in type(thing).__mro__}
    return tuple(sorted(packages - {_PACKAGE, "abc", "builtins", "typing"}))


class Codec:
    """Packs and unpacks what travels. A node of the tree is a number, a string, None, a list, or a dict with one key
    that says what it is; tensors lie beside it, each once.

    Args:
        known: what the other side has too, in the same order.
        packages: whose classes and functions travel beside those of llm_fed; of both sides the same.
    """

    def __init__(self, known: Sequence[object] = (), packages: Collection[str] = ()):
        self._known, self._packages = known, (_PACKAGE, *packages)
        self._number = {id(item): number for number, item in enumerate(known)}

    def pack(self, item: object) -> bytes:
        """The bytes of a tree of numbers, strings, lists, tuples, dicts, tensors, states, and what stands above.
        TypeError: something in it cannot travel, e.g. a function within another."""
        tensors: Tensors = {}
        tree = self._tree(item, tensors)
        return wire.pack([tree, [tensor for _, tensor in tensors.values()]])

    def unpack(self, data: bytes) -> Any:
        """What was packed; tensors in fresh memory, on the CPU."""
        tree, tensors = wire.unpack(data)
        return self._item(tree, tensors)

    def _tree(self, item: object, tensors: Tensors) -> Any:
        tree = partial(self._tree, tensors=tensors)
        if item is None or isinstance(item, bool | int | float | str):
            return item
        if id(item) in self._number:
            return {"known": self._number[id(item)]}
        if isinstance(item, tuple):
            return {"tuple": list(map(tree, item))}
        if isinstance(item, Sequence) and not isinstance(item, bytes):  # a list, or encodings that are made when read
            return list(map(tree, item))
        if isinstance(item, dict):
            return {"dict": [[tree(key), tree(value)] for key, value in item.items()]}
        if isinstance(item, Tensor):
            return {"tensor": _number(item, tensors)}
        if isinstance(item, State):
            shapes = [[name, list(shape)] for name, shape in item.layout.shape_of.items()]
            return {"state": [shapes, _number(item.row, tensors), tree(item.extras)]}
        if isinstance(item, partial):
            return {"partial": [tree(item.func), tree(item.args), tree(item.keywords)]}
        if isinstance(item, MethodType):
            return {"method": [tree(item.__func__), tree(item.__self__)]}
        if isinstance(item, FunctionType):
            return {"function": self._name(item)}
        if isinstance(item, Exception):
            return {"error": [self._name(type(item)), str(item)]}
        if is_dataclass(item):
            values = {field.name: getattr(item, field.name) for field in fields(item) if field.init}
            return {"new": [self._name(type(item)), tree(values)]}
        raise TypeError(f"{type(item).__name__} cannot travel between processes")

    def _item(self, tree: Any, tensors: Sequence[Tensor]) -> Any:
        item = partial(self._item, tensors=tensors)
        match tree:
            case list():
                return list(map(item, tree))
            case {"known": number}:
                return self._known[number]
            case {"tuple": parts}:
                return tuple(map(item, parts))
            case {"dict": pairs}:
                return {item(key): item(value) for key, value in pairs}
            case {"tensor": number}:
                return tensors[number]
            case {"state": [shapes, row, extras]}:
                layout = Layout(tuple(name for name, _ in shapes), tuple(tuple(shape) for _, shape in shapes))
                return State(layout, tensors[row], item(extras))
            case {"partial": [function, arguments, keywords]}:
                return partial(item(function), *item(arguments), **item(keywords))
            case {"method": [function, thing]}:
                return MethodType(item(function), item(thing))
            case {"function": name}:
                return self._named(name)
            case {"error": [name, text]}:
                return self._named(name)(text)
            case {"new": [name, values]}:
                return self._named(name)(**item(values))
        return tree

    def _name(self, thing: type | FunctionType) -> str:
        """Where a class or function is found. TypeError: it is of another package, or lies within a function."""
        if thing.__module__.partition(".")[0] not in self._packages or "<" in thing.__qualname__:
            raise TypeError(
                f"{thing.__module__}.{thing.__qualname__} cannot travel between processes: only classes and functions "
                f"that a module of {' or '.join(self._packages)} defines can (a loss may be a functools.partial of "
                "such a function)"
            )
        return f"{thing.__module__}:{thing.__qualname__}"

    def _named(self, name: str) -> Callable[..., Any]:
        module, _, path = name.partition(":")
        if module.partition(".")[0] not in self._packages:
            raise TypeError(f"{name} is of no package whose names may travel ({', '.join(self._packages)})")
        return attrgetter(path)(importlib.import_module(module))  # type: ignore[no-any-return]


def _number(tensor: Tensor, tensors: Tensors) -> int:
    """The number of the tensor, or of an earlier one with the same bits (clients often start from equal states)."""
    tensor = tensor.detach().cpu().contiguous()
    bits = hashlib.blake2b(tensor.flatten().view(torch.uint8).numpy().data).digest()
    key = tensor.dtype, tensor.shape, bits
    number, _ = tensors.setdefault(key, (len(tensors), tensor))
    return number
