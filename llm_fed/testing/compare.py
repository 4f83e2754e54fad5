"""Messages and runs that are to be equal: where they are not, what was got and what was expected."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from llm_fed.state import State
from llm_fed.state.outline import skeleton
from llm_fed.state.wire import pack, unpack
from llm_fed.testing.federation import Outcome


class Failed(AssertionError):
    """A check that a method does not pass: what was got, and what was expected."""


def same(what: str, got: Any, expected: Any) -> None:
    """Raises: Failed: two messages are not the same bytes."""
    if pack(got) != pack(expected):
        raise Failed(f"{what} differs: {difference(got, expected) or 'its keys stand in another order'}")


def alike(what: str, got: Any, expected: Any) -> None:
    """Raises: Failed: two messages have other entries, shapes or dtypes."""
    if skeleton(got) != skeleton(expected):
        raise Failed(f"{what} looks different: {difference(got, expected, looks=True)}")


def close(what: str, got: Any, expected: Any, tolerance: float) -> None:
    """Raises: Failed: two messages are not alike, or a number differs by more than `tolerance`."""
    alike(what, got, expected)
    one, other = load(pack(got)), load(pack(expected))  # the tensors that travel, e.g. factors of an update
    far = any(not _near(tensor, other[key], tolerance) for key, tensor in one.items())
    if location := difference(got, expected, tolerance) or (far and "a factor of it is another one"):
        raise Failed(f"{what} differs by more than {tolerance:g}: {location}")


def close_runs(got: Outcome, expected: Outcome, tolerance: float) -> None:
    """Raises: Failed: states, memories or personal models of two runs are not `close`."""
    close("the server's state", got.state, expected.state, tolerance)
    personal, others = got.ask("personalize", got.messages()), expected.ask("personalize", expected.messages())
    for name, site in got.clients.items():
        close(f"the memory of {name}", dict(site.memory), dict(expected.clients[name].memory), tolerance)
        close(f"the personal model of {name}", personal[name], others[name], tolerance)
    memory, other = (dict(sorted(run.server.memory.items())) for run in (got, expected))
    close("the server's memory", memory, other, tolerance)


def equal_runs(got: Outcome, expected: Outcome) -> None:
    """Raises: Failed: two runs have other states, memories or lines of metrics.jsonl."""
    same("the server's state", got.state, expected.state)
    for name, memory in got.memories.items():
        same(f"the memory of {name}", unpack(memory), unpack(expected.memories[name]))
    for line, other in zip(got.metrics.splitlines(), expected.metrics.splitlines(), strict=True):
        if line != other:
            raise Failed(f"a line of metrics.jsonl differs: {line.decode()}; expected {other.decode()}")


def difference(got: Any, expected: Any, tolerance: float = 0.0, looks: bool = False, where: str = "it") -> str:
    """The first place in which two messages differ, in words; empty where none does.

    Args:
        looks: compare names, shapes and dtypes alone.
        where: what the messages are, or where in one they stand.
    """
    if isinstance(got, State) and isinstance(expected, State):
        got, expected = ({**state.tensors(), **state.extras} for state in (got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        if missing := [key for key in [*expected, *got] if key not in got or key not in expected]:
            return f"{where} has {'no' if missing[0] in expected else 'an unexpected'} {missing[0]}"
        pairs = {key: (value, expected[key]) for key, value in got.items()}
    elif isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return f"{where} has {len(got)} items; expected {len(expected)}"
        pairs = {str(number): pair for number, pair in enumerate(zip(got, expected, strict=True))}
    elif isinstance(got, Tensor) and isinstance(expected, Tensor):
        return _tensors(got, expected, tolerance, looks, where)
    else:
        return _values(got, expected, tolerance, looks, where)
    for key, (one, other) in pairs.items():
        location = key if where == "it" else f"{where}.{key}"
        if flaw := difference(one, other, tolerance, looks, location):
            return flaw
    return ""


def _tensors(got: Tensor, expected: Tensor, tolerance: float, looks: bool, where: str) -> str:
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        kinds = (f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (got, expected))
        return "{} is {}; expected {}".format(where, *kinds)
    if looks or _near(got, expected, tolerance):
        return ""
    gap = (got.double() - expected.double()).abs().flatten()
    worst = int(gap.nan_to_num(torch.inf).argmax())
    one, other = got.flatten()[worst].item(), expected.flatten()[worst].item()
    return f"{where} has {one:.6g} at {worst}; expected {other:.6g}"


def _values(got: Any, expected: Any, tolerance: float, looks: bool, where: str) -> str:
    same_kind = type(got) is type(expected)
    if same_kind and (looks or (isinstance(got, float) and abs(got - expected) <= tolerance) or got == expected):
        return ""
    return f"{where} is {got!r:.60}; expected {expected!r:.60}"


def _near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool(torch.isclose(got, expected, rtol=0, atol=tolerance).all())
