"""Roles: which values each part of an upload may have, beside its shape and dtype. A method declares them in `sends`.

A state is a row of weights without being declared. Every other part of an upload needs a role, by its path:

    sends = {"prototypes": Statistic(rows="counts"), "counts": Counts()}

What a role bounds is checked when an upload arrives, before the method sees it. Some bounds depend on what the client
was sent (`Given`), others on what the other clients of the round send (`llm_fed.federation.bounds`).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.state import State
from llm_fed.state.outline import Leaf, Message, Skeleton, at, leaves, mapped, skeleton

Value = TypeVar("Value")
_TOLERANCE = 1e-6  # of a variance: what rounding leaves of the difference and the sum of two
_KINDS = {float: "a float", int: "a whole number", str: "a text", bool: "a bool"}
_MOST = 2**53  # of a counter among the buffers of a model: a whole number that every float holds


@dataclass(frozen=True)
class Given:
    """What is known of an upload before it comes; it is kept beside the request.

    Args:
        skeleton: of `Method.upload_like`.
        sent: of `Method.upload_like`, its whole numbers, its texts, and the buffers of its states; None: nothing is
            known.
        examples: how many training examples the client has, as it said when it joined; None: it is not known.
    """

    skeleton: Skeleton = None
    sent: Any = None
    examples: int | None = None

    @classmethod
    def of(cls, like: Message, examples: int | None) -> Given:
        """Args: like: what `Method.upload_like` makes of the message that the client is sent."""
        return cls(skeleton(like), mapped(like, _kept), examples)

    def message(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {"skeleton": self.skeleton, "sent": self.sent, "examples": self.examples}

    def at(self, path: str) -> Any:
        """What is known of the part of the upload at a path."""
        return at(self.sent, path)


def _kept(leaf: Leaf) -> dict[str, Tensor] | int | str | None:
    if isinstance(leaf, State):
        return dict(leaf.extras)
    return leaf if isinstance(leaf, int | str) and not isinstance(leaf, bool) else None


class Role(Generic[Value]):
    """What one part of an upload is."""

    fits: tuple[str, ...] = ()  # what it can be the role of, see `_kind`

    def flaw(self, value: Value, path: str, upload: Message, given: Given) -> str:
        """Describes what is wrong with a part of an upload, whatever the other clients send; empty where nothing is."""
        raise NotImplementedError


@dataclass(frozen=True)
class Weights(Role[State]):
    """A state: a row of weights, whose norm is compared with the other clients', and the buffers beside it: running
    statistics, whose variances are 0 or more, and counters.

    Args:
        changes: whether running statistics are sent as their change in the client's training, or as they are then.
        known: whether `Method.upload_like` has those that the client was sent; if not, changes are compared alone.
    """

    changes: bool = True
    known: bool = True
    fits = ("a state",)

    def flaw(self, value: State, path: str, upload: Message, given: Given) -> str:
        sent: Any = given.at(path) if self.known else None
        for name, tensor in value.extras.items():
            if not tensor.is_floating_point():
                low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
                if low < 0 or high > _MOST:
                    return f".extras.{name} holds {low if low < 0 else high}, and a counter is 0 to 2**53"
            elif is_variance(name) and not (self.changes and sent is None):
                start = sent[name] if self.changes else torch.zeros_like(tensor)
                variance = tensor + start
                if not bool((variance >= -_TOLERANCE * start.abs()).all()):
                    said = f"{float(variance.min()):.3g}, and a variance is 0 or more"
                    return f".extras.{name} holds a variance of {said}"
        return ""


def is_variance(name: str) -> bool:
    """Whether a buffer of this name holds variances (torch's name)."""
    return name.rpartition(".")[2] == "running_var"


@dataclass(frozen=True)
class Statistic(Role[float | Tensor]):
    """Numbers that a client computes of its examples, as a float or a tensor. `least`, `most`: the range of each
    number; a probability has 0 and 1. `rows`: the entry beside it that says which of its rows the client has examples
    of, as counts or flags. The other rows are 0."""

    least: float = -math.inf
    most: float = math.inf
    rows: str = ""
    fits = ("a float", "a tensor of floats")

    def flaw(self, value: float | Tensor, path: str, upload: Message, given: Given) -> str:
        value = torch.as_tensor(value)
        if value.numel():
            low, high = (float(end) for end in value.aminmax())
            if low < self.least or high > self.most:
                said = low if low < self.least else high
                return f" holds {said:.3g}, and it is {self.least:g} to {self.most:g}"
        if self.rows and bool((value[~self.present(path, upload)] != 0).any()):
            return f" has numbers in rows of which it has no examples ({self.rows})"
        return ""

    def present(self, path: str, upload: Message) -> Tensor:
        """(C,), bool: the rows of which the client has examples."""
        counts: Tensor = at(upload, ".".join([*path.split(".")[:-1], self.rows]))
        return counts > 0


@dataclass(frozen=True)
class Counts(Role[Tensor]):
    """How many of the client's training examples belong to each class: 0 or more, in all as many as it has."""

    fits = ("a tensor of whole numbers",)

    def flaw(self, value: Tensor, path: str, upload: Message, given: Given) -> str:
        values = value.flatten().tolist()  # Python's own numbers, whose sum has no limit
        if min(values, default=0) < 0:
            return f" holds {min(values)}, and a count is 0 or more"
        if given.examples is not None and sum(values) != given.examples:
            return f" adds up to {sum(values)}, and the client has {given.examples} training examples"
        return ""


@dataclass(frozen=True)
class Index(Role[int]):
    """A whole number from `least` to the one that `Method.upload_like` has in its place."""

    least: int = 0
    fits = ("a whole number",)

    def flaw(self, value: int, path: str, upload: Message, given: Given) -> str:
        most = given.at(path)
        if value >= self.least and (most is None or value <= most):
            return ""
        return f" is {value}, and it is {self.least} to {most}" if most is not None else f" is {value}, below 0"


@dataclass(frozen=True)
class Echo(Role[int | str]):
    """The number or text that `Method.upload_like` has in its place, such as the version that was sent."""

    fits = ("a whole number", "a text")

    def flaw(self, value: int | str, path: str, upload: Message, given: Given) -> str:
        sent = given.at(path)
        return "" if sent is None or value == sent else f" is {reprlib.repr(value)}, and the client was sent {sent!r}"


@dataclass(frozen=True)
class Flags(Role[bool | Tensor]):
    """True or False, one or a tensor. `some`: at least one is True: which classes a client has examples of."""

    some: bool = False
    fits = ("a bool", "a tensor of bools")

    def flaw(self, value: bool | Tensor, path: str, upload: Message, given: Given) -> str:
        return " has no flag that is set" if self.some and not bool(torch.as_tensor(value).any()) else ""


Roles = Mapping[str, Role[Any]]  # by index: the keys that lead to it, with dots in between


def role_of(sends: Roles, path: str, value: Leaf) -> Role[Any] | None:
    """The role of a part of an upload; None where it has none."""
    return sends.get(path, Weights() if isinstance(value, State) else None)


def check(name: str, sends: Roles, like: Message) -> None:
    """Refuse a method that sends something without a role. UserError: what has no role, has one that does not suit it,
    or has one and is not sent. `name`: of the method. `like`: what its `upload_like` gives."""
    parts = dict(leaves(like))
    for path, value in parts.items():
        if value is None:
            continue  # of its skeleton there is no other
        role, what, kind = role_of(sends, path, value), path or "its upload", _kind(value)
        if role is None:
            raise UserError(
                f"the method {name} sends {what} ({kind}) without saying what it is, so the server could not "
                "check it; name its role in the class attribute `sends` (llm_fed/state/roles.py)"
            )
        if kind not in role.fits:
            said = f"{what} ({kind}) as {type(role).__name__}"
            raise UserError(f"the method {name} sends {said}, which is a role of {' or '.join(role.fits)}")
        rows = role.rows if isinstance(role, Statistic) else ""
        if rows and ".".join([*path.split(".")[:-1], rows]) not in parts:
            raise UserError(f"the method {name} sends {what} with rows={rows!r}, which is not sent beside it")
    if left := [path for path in sends if path not in parts]:
        raise UserError(
            f"the method {name} names a role of {left[0]!r}, which it does not send; it sends {', '.join(parts)}"
        )


def _kind(value: Leaf) -> str:
    if isinstance(value, Tensor):
        whole = "bools" if value.dtype == torch.bool else "whole numbers"
        return f"a tensor of {'floats' if value.is_floating_point() else whole}"
    return "a state" if isinstance(value, State) else _KINDS.get(type(value), type(value).__name__)


def own_flaw(upload: Message, sends: Roles, given: Given) -> str:
    """What is wrong with an upload whatever the other clients send: the part, its value and the bound; empty where
    nothing is. `upload`: of the skeleton that it must have."""
    for path, value in leaves(upload):
        role = role_of(sends, path, value)
        if role is not None and (said := role.flaw(value, path, upload, given)):
            return f"upload{'.' * bool(path)}{path}{said}"
    return ""
