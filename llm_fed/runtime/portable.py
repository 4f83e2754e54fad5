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
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.method.requests import Query
from llm_fed.method.site import Site
from llm_fed.state import Layout, State, wire

_PACKAGE = __name__.partition(".")[0]
_SAMPLE = 256  # numbers of a tensor that are looked at before two tensors are compared


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
    """Packs and unpacks what travels.

    Args:
        known: what the other side has too, in the same order.
        packages: whose classes and functions travel beside those of llm_fed; of both sides the same.
    """

    def __init__(self, known: Sequence[object] = (), packages: Collection[str] = ()):
        self._known, self._packages = known, (_PACKAGE, *packages)
        self._number = {id(item): number for number, item in enumerate(known)}

    def pack(self, item: Any) -> bytes:
        """The bytes of a tree of numbers, strings, lists, tuples, dicts, tensors, states, and what stands above.
        TypeError: something in it cannot travel, e.g. a function within another."""
        writer = _Writer(self._number, self._packages)
        tree = writer.tree(item)
        layouts = [[list(layout.names), [list(shape) for shape in layout.shapes]] for layout in writer.layouts]
        return wire.pack([tree, layouts, writer.tensors])

    def unpack(self, data: bytes) -> Any:
        """What was packed; tensors in fresh memory, on the CPU."""
        tree, layouts, tensors = wire.unpack(data)
        made = [Layout(tuple(names), tuple(tuple(shape) for shape in shapes)) for names, shapes in layouts]
        return _Reader(self._known, self._packages, made, tensors).item(tree)


class _Writer:
    """One message's tree, with its tensors and layouts beside it. A node of the tree is a number, a string, None, a
    list, or a dict with one key that says what it is."""

    def __init__(self, number: dict[int, int], packages: Sequence[str]):
        self._number, self._packages = number, packages
        self.tensors: list[Tensor] = []
        self.layouts: dict[Layout, int] = {}
        self._alike: dict[Any, list[int]] = {}

    def tree(self, item: Any) -> Any:
        if item is None or isinstance(item, bool | int | float | str):
            return item
        if id(item) in self._number:
            return {"known": self._number[id(item)]}
        if isinstance(item, tuple):
            return {"tuple": [self.tree(part) for part in item]}
        if isinstance(item, Sequence) and not isinstance(item, bytes):  # a list, or encodings that are made when read
            return [self.tree(part) for part in item]
        if isinstance(item, dict):
            return {"dict": [[self.tree(key), self.tree(value)] for key, value in item.items()]}
        if isinstance(item, Tensor):
            return {"tensor": self._tensor(item)}
        if isinstance(item, State):
            layout = self.layouts.setdefault(item.layout, len(self.layouts))
            return {"state": [layout, self._tensor(item.row), self.tree(item.extras)]}
        if isinstance(item, partial):
            return {"partial": [self.tree(item.func), self.tree(item.args), self.tree(item.keywords)]}
        if isinstance(item, MethodType):
            return {"method": [self.tree(item.__self__), item.__name__]}
        if isinstance(item, FunctionType):
            return {"function": self._name(item)}
        if isinstance(item, Exception):
            return {"error": [self._name(type(item)), str(item)]}
        if is_dataclass(item):
            values = {field.name: getattr(item, field.name) for field in fields(item) if field.init}
            return {"new": [self._name(type(item)), self.tree(values)]}
        raise TypeError(f"{type(item).__name__} cannot travel between processes")

    def _name(self, thing: type | FunctionType) -> str:
        """Where a class or function is found. TypeError: it is of another package, or lies within a function."""
        if thing.__module__.partition(".")[0] not in self._packages or "<" in thing.__qualname__:
            raise TypeError(
                f"{thing.__module__}.{thing.__qualname__} cannot travel between processes: only classes and functions "
                f"that a module of {' or '.join(self._packages)} defines can (a loss may be a functools.partial of "
                "such a function)"
            )
        return f"{thing.__module__}:{thing.__qualname__}"

    def _tensor(self, tensor: Tensor) -> int:
        """The number of the tensor, or of an earlier one with the same bits (clients often start from equal states)."""
        tensor = tensor.detach().cpu().contiguous()
        sample = tensor.flatten()[:: max(1, tensor.numel() // _SAMPLE)]
        alike = self._alike.setdefault((tensor.dtype, tensor.shape, _bits(sample).numpy().tobytes()), [])
        for number in alike:
            if torch.equal(_bits(self.tensors[number]), _bits(tensor)):
                return number
        alike.append(len(self.tensors))
        self.tensors.append(tensor)
        return alike[-1]


class _Reader:
    """The inverse of `_Writer`."""

    def __init__(
        self, known: Sequence[object], packages: Sequence[str], layouts: Sequence[Layout], tensors: Sequence[Tensor]
    ):
        self._known, self._packages, self._layouts, self._tensors = known, packages, layouts, tensors

    def item(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.item(part) for part in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "known":
            return self._known[content]
        if kind == "tuple":
            return tuple(self.item(part) for part in content)
        if kind == "dict":
            return {self.item(key): self.item(value) for key, value in content}
        if kind == "tensor":
            return self._tensors[content]
        if kind == "state":
            layout, row, extras = content
            return State(self._layouts[layout], self._tensors[row], self.item(extras))
        if kind == "partial":
            function, arguments, keywords = map(self.item, content)
            return partial(function, *arguments, **keywords)
        if kind == "method":
            return getattr(self.item(content[0]), content[1])
        if kind == "function":
            return self._named(content)
        if kind == "error":
            return self._named(content[0])(content[1])
        assert kind == "new", kind
        return self._named(content[0])(**self.item(content[1]))

    def _named(self, name: str) -> Callable[..., Any]:
        module, _, path = name.partition(":")
        if module.partition(".")[0] not in self._packages:
            raise TypeError(f"{name} is of no package whose names may travel ({', '.join(self._packages)})")
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        return value


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes: NaN equals NaN, and 0 differs from -0."""
    return tensor.contiguous().flatten().view(torch.uint8)
