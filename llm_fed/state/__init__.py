"""State: named tensors with arithmetic. The float entries lie in one flat row, so K states stack to a (K, P) matrix."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llm_fed.basics.errors import UserError

FACTORS = ("lora_A", "lora_B")  # what the names of an adapter's entries end with
MAGNITUDE = "lora_magnitude_vector"  # of DoRA, as PEFT calls it: the length of each output's weights
HEAD = "head"  # beside them: the entries of modules that are trained whole


@dataclass(frozen=True)
class Layout:
    """Where each named entry lies in a flat row of length P = `size`, in the order of `names`."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The indices of each entry in the row."""
        indices, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            indices[name] = slice(start, start + math.prod(shape))
            start = indices[name].stop
        return indices

    @cached_property
    def shape_of(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(self.names, self.shapes, strict=True))

    @property
    def size(self) -> int:
        """P: the number of parameters in a row."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def head(self) -> str:
        """The name of an image model's last linear layer, whose weight (C, H) is the last matrix."""
        matrices = [name for name in self.names if len(self.shape_of[name]) == 2]
        return module_of(matrices[-1])

    def matching(self, pattern: str, setting: str = "") -> tuple[str, ...]:
        """The names in which the regular expression `pattern` is found.

        Args:
            setting: the setting that the pattern comes from, for messages.

        Raises:
            UserError: nothing matches, or `pattern` is not a regular expression.
        """
        said = f"{setting}={pattern!r}" if setting else repr(pattern)
        try:
            names = tuple(name for name in self.names if re.search(pattern, name))
        except re.error as error:
            raise UserError(f"{said} is not a regular expression: {error}") from error
        if not names:
            example = difflib.get_close_matches(pattern, self.names, n=1, cutoff=0) or ["none"]
            raise UserError(f"{said} matches none of {len(self.names)} entries, e.g. {example[0]}")
        return names

    def joined(self, names: Iterable[str]) -> list[slice]:
        """The indices of these entries, in their order, neighbours joined into as few slices as possible."""
        joined: list[slice] = []
        for name in names:
            index = self.slices[name]
            if joined and joined[-1].stop == index.start:
                joined[-1] = slice(joined[-1].start, index.stop)
            else:
                joined.append(index)
        return joined


def module_of(entry: str) -> str:
    """The name of the module whose parameter or buffer an entry is."""
    return entry.rpartition(".")[0]


def block_of(entry: str) -> int | None:
    """The number of an entry's block, as torch numbers the members of a list; None outside of lists."""
    number = re.search(r"\.(\d+)\.", entry)
    return int(number[1]) if number else None


class State:
    """Named float tensors in one row (P,), and `extras` (integer or running-statistics buffers) beside it.

    A state is a value: operations return new states and never change their operands. Floating-point extras take part in
    + - *, and other extras are taken from the left operand. Extras are not in `row`, so no norm and no inner product
    includes them.
    """

    __slots__ = ("layout", "row", "extras")

    def __init__(self, layout: Layout, row: Tensor, extras: Mapping[str, Tensor] | None = None):
        if row.shape != (layout.size,):
            raise ValueError(f"a row of shape {tuple(row.shape)} for a layout of {layout.size} parameters")
        self.layout, self.row, self.extras = layout, row, dict(extras or {})

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], extras: Mapping[str, Tensor] | None = None) -> State:
        """A state from named tensors, in this order. ValueError: they do not all have one floating dtype."""
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(f"a state's entries have one floating dtype, got {', '.join(sorted(map(str, dtypes)))}")
        layout = Layout(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))
        flat = [tensor.detach().reshape(-1) for tensor in tensors.values()]
        return cls(layout, torch.cat(flat) if flat else torch.zeros(0), extras)

    def __getitem__(self, name: str) -> Tensor:
        """A view of one entry in its own shape."""
        return self.row[self.layout.slices[name]].view(self.layout.shape_of[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def tensors(self) -> dict[str, Tensor]:
        """Every entry of the row by name, as views."""
        return {name: self[name] for name in self}

    def like(self, row: Tensor) -> State:
        """A state of this layout, and with these extras, around another row (P,)."""
        return State(self.layout, row, self.extras)

    def select(self, pattern: str) -> State:
        """The entries whose name contains the regular expression `pattern`, as a smaller state (extras likewise)."""
        extras = {name: value for name, value in self.extras.items() if re.search(pattern, name)}
        return State.of({name: self[name] for name in self.layout.matching(pattern)}, extras)

    def pick(self, names: Sequence[str], extras: Mapping[str, Tensor] | None = None) -> State:
        """These entries in this order, as a smaller state with these extras, or without any."""
        return State.of({name: self[name] for name in names}, extras)

    def renamed(self, old: str, new: str) -> State:
        """The same state with `old` replaced by `new` in the entries' names."""
        names = tuple(name.replace(old, new) for name in self.layout.names)
        return State(Layout(names, self.layout.shapes), self.row, self.extras)

    def updated(self, other: State) -> State:
        """This state with its entries replaced by those of `other`, which must be a subset of them."""
        row = self.row.clone()
        for name in other:
            row[self.layout.slices[name]] = other[name].reshape(-1)
        return State(self.layout, row, {**self.extras, **other.extras})

    def _plus(self, other: State, sign: int) -> State:
        if self.layout != other.layout:
            raise ValueError(f"states of different entries: {_difference(self.layout, other.layout)}")
        extras = _floating(self.extras, lambda name, value: value + sign * other.extras[name])
        return State(self.layout, torch.add(self.row, other.row, alpha=sign), extras)

    def __add__(self, other: State) -> State:
        return self._plus(other, 1)

    def __sub__(self, other: State) -> State:
        return self._plus(other, -1)

    def __mul__(self, factor: float) -> State:
        return State(self.layout, self.row * factor, _floating(self.extras, lambda name, value: value * factor))

    __rmul__ = __mul__

    def norm(self) -> float:
        """The Euclidean norm of the row."""
        return float(torch.linalg.vector_norm(self.row))

    def is_finite(self) -> bool:
        """Whether no entry and no extra holds NaN or an infinite number."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in (self.row, *self.extras.values()))

    def equal(self, other: State) -> bool:
        """Whether entries, values and extras are the same, bit for bit."""
        return (
            self.layout == other.layout
            and torch.equal(self.row, other.row)
            and self.extras.keys() == other.extras.keys()
            and all(torch.equal(value, other.extras[name]) for name, value in self.extras.items())
        )

    def __repr__(self) -> str:
        return f"State({len(self)} entries, {self.layout.size:,} parameters, {self.row.dtype})"


def stack(states: Iterable[State]) -> Tensor:
    """The rows of K states of the same layout as a matrix (K, P), so that merging is one matrix product. ValueError: no
    states, or states of different layouts."""
    states = list(states)
    if not states:
        raise ValueError("cannot stack no states")
    for state in states[1:]:
        if state.layout != states[0].layout:
            raise ValueError(f"states of different entries: {_difference(states[0].layout, state.layout)}")
    return torch.stack([state.row for state in states])


def combine(states: Sequence[State], weights: Tensor) -> State:
    """`sum_k weights[k] * states[k]` with weights (K,), as one matrix product on the rows; also for floating extras."""
    (row,) = weights[None].to(states[0].row.dtype) @ stack(states)

    def mixed(name: str, first: Tensor) -> Tensor:
        return torch.tensordot(weights.to(first.dtype), torch.stack([state.extras[name] for state in states]), dims=1)

    return State(states[0].layout, row, _floating(states[0].extras, mixed))


def rebased(update: State, sent: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> State:
    """The same update, its running statistics as the change from other ones: added to `now` they give those that the
    client had, as they did when added to `sent`. Of several changes from one model the second would otherwise move the
    statistics past the client's own, and variances below 0.

    Args:
        sent: extras, by name.
        now: the same.
    """
    extras = _floating(update.extras, lambda name, value: value + (sent[name] - now[name]))
    return State(update.layout, update.row, extras)


def _floating(extras: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """The extras, those of floating numbers changed."""
    return {name: change(name, value) if value.is_floating_point() else value for name, value in extras.items()}


def _difference(left: Layout, right: Layout) -> str:
    for name in left.names + right.names:
        ours, theirs = left.shape_of.get(name), right.shape_of.get(name)
        if ours != theirs:
            return f"{name} is {ours or 'absent'} here and {theirs or 'absent'} there"
    return "the same entries in another order"


def pair(module: str, expert: str) -> tuple[str, str]:
    """The names of an expert's two entries on a layer."""
    index = f"{module}.{expert}" if expert else module
    first, second = FACTORS
    return f"{index}.{first}", f"{index}.{second}"


def factor_of(name: str) -> str:
    """Which of FACTORS an entry is, MAGNITUDE, or HEAD."""
    last = name.rpartition(".")[2]
    return last if last in (*FACTORS, MAGNITUDE) else HEAD


def magnitude(module: str) -> str:
    """The name of a layer's magnitudes."""
    return f"{module}.{MAGNITUDE}"


def router(module: str) -> str:
    """The name of a layer's router."""
    return f"{module}.router"
