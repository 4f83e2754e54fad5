"""Messages and runs that are to be equal: where they are not, what was got and what was expected."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors.torch import load
from torch import Tensor

from llm_fed.state import State, outline
from llm_fed.state.outline import skeleton
from llm_fed.state.wire import Message, pack, unpack
from llm_fed.testing.federation import Outcome


class Failed(AssertionError):
    """A check that a method does not pass: what was got, and what was expected."""


def same(what: str, got: Message, expected: Message) -> None:
    """Raises: Failed: two messages are not the same bytes."""
    if pack(got) != pack(expected):
        raise Failed(f"{what} differs: {difference(got, expected) or 'its keys stand in another order'}")


def alike(what: str, got: Message, expected: Message) -> None:
    """Raises: Failed: two messages have other entries, shapes or dtypes."""
    if flaw := outline.difference(skeleton(got), skeleton(expected), "it"):
        raise Failed(f"{what} looks different: {flaw}")


def close(what: str, got: Message, expected: Message, tolerance: float) -> None:
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


def difference(got: Message, expected: Message, tolerance: float = 0.0) -> str:
    """The first place in which two messages differ, in words; empty where none does."""
    if flaw := outline.difference(skeleton(got), skeleton(expected), "it"):
        return flaw
    others = dict(_parts(expected))
    for where, one in _parts(got):
        other = others[where]
        if isinstance(one, Tensor):
            if not _near(one, other, tolerance):
                gap = (one.double() - other.double()).abs().flatten()
                worst = int(gap.nan_to_num(torch.inf).argmax())
                numbers = (f"{tensor.flatten()[worst].item():.6g}" for tensor in (one, other))
                return f"{where} has {next(numbers)} at {worst}; expected {next(numbers)}"
        elif one != other and not (isinstance(one, float) and abs(one - other) <= tolerance):
            return f"{where} is {one!r:.60}; expected {other!r:.60}"
    return ""


def _parts(message: Message) -> Iterator[tuple[str, Message]]:
    """The values and tensors of a message, also those of states, each with its place."""
    for where, leaf in outline.leaves(message):
        held = {**leaf.tensors(), **leaf.extras} if isinstance(leaf, State) else {"": leaf}
        yield from ((f"{where}.{name}".strip(".") or "it", value) for name, value in held.items())


def _near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool(torch.isclose(got, expected, rtol=0, atol=tolerance).all())
