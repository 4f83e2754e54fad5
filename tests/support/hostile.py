"""Answers that no honest client gives: real ones, changed at random in structure, tensors or bytes."""

import json
import math
import random
import struct
import time
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from llm_fed.eval import merges
from llm_fed.federation.uploads import flaws
from llm_fed.merge import mean
from llm_fed.network.link import PendingOrder, Reply, flaw_of
from llm_fed.state import State
from llm_fed.state.lowrank import truncated
from llm_fed.state.outline import skeleton
from llm_fed.state.roles import Given
from llm_fed.state.wire import WireError, pack, unpack

CONTENT = {"ask": "1-1", "examples": 6, "loss": 1.5, "steps": 2}
RECIPE = {"lambda_fed": 0.4, "a": 1.0, "b": 2.0, "c": 0.0, "sweep": {"0.001": 0.4}, "note": "it has memorised them"}
CLAIMS = {"error": "", "failed": "", "score": 50.0, "clients": {"ada": 6}, "recipe": RECIPE}


@dataclass(frozen=True)
class Kind:
    """What one kind of method uploads."""

    message: Any
    encoding: str | None = None

    @property
    def data(self) -> bytes:
        return pack(self.message, self.encoding)


def _state(**extras: torch.Tensor) -> State:
    draws = torch.Generator().manual_seed(0)
    shapes = {"layers.0.lora_A": (2, 6), "layers.0.lora_B": (6, 2), "head.weight": (3, 2, 2), "head.bias": (3,)}
    return State.of({name: torch.randn(*shape, generator=draws) for name, shape in shapes.items()}, extras)


_MATRIX = State.of({"w": torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 9.0)), "b": torch.ones(3)})
KINDS = {
    "update": Kind(_state()),
    "float16": Kind(_state(), "float16"),
    "bfloat16": Kind(_state(), "bfloat16"),
    "with extras": Kind(_state(mean=torch.ones(3), count=torch.tensor(7))),
    "low-rank (FedKD)": Kind({"version": 3, "update": truncated(_MATRIX, 0.95)}),
    "chosen model (IFCA)": Kind({"model": 0, "delta": _state()}),
    "prototypes (FedProto)": Kind({"prototypes": torch.ones(3, 4), "counts": torch.arange(3)}),
    "logits (FD)": Kind({"logits": torch.ones(3, 3), "seen": torch.ones(3, dtype=torch.bool)}),
    "several (SCAFFOLD)": Kind({"model": _state(), "control": _state()}),
    "nothing (FedFT)": Kind({}),
}

_HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 10**9, 2**31, 2**62, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308,
    math.nan, math.inf, "", "0", "1", "t", "abc", "\ud800", "\x1b[31m\n", "\u202eabc", "../../etc", "ada", "x" * 2000,
    "float32", "float64", [], {}, [[]], [0], [-1], [2**40, 0], [2**31, 2**31], ["a", 10**9], [1.0, 2.0],
    [[10**6, 10**6]], {"t": "0"}, {"d": []}, {"t": 0}, {"s": [[], []]}, {"d": [["a", 1], ["a", 2]]},
]  # fmt: skip
_DTYPES = (
    "F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "U8", "U16", "U64", "BOOL", "F8_E4M3", "F8_E5M2", "F4",
    "C64", "X", "",
)  # fmt: skip


def mutated(kind: Kind, draw: random.Random) -> bytes:
    """The kind's packed message with one to four changes."""
    data = kind.data
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    tree = json.loads(header["__metadata__"]["llm_fed"])
    way = draw.random()
    for _ in range(draw.randint(1, 4)):
        if way < 0.5:
            tree = changed(tree, draw)
        elif way < 0.65:
            header = changed_tensor(header, draw)
        elif way < 0.75:
            header = changed(header, draw) if isinstance(header, dict) else header
        else:
            _spoil_numbers(header, body, draw)
    if way < 0.6 or way >= 0.75:
        header["__metadata__"] = {"llm_fed": json.dumps(tree)}
    text = json.dumps(header).encode()
    packed = struct.pack("<Q", len(text)) + text + bytes(body)
    return changed_bytes(packed, draw) if draw.random() < 0.15 else packed


def claimed(draw: random.Random) -> dict[str, Any]:
    """What comes beside an answer, as JSON, with up to three changes."""
    content: Any = json.loads(json.dumps(CONTENT | CLAIMS))
    for _ in range(draw.randint(0, 3)):
        content = changed(content, draw)
    with suppress(ValueError, RecursionError):  # as `flower._opened` has it
        content = json.loads(json.dumps(content))
        return content if isinstance(content, dict) else {}
    return {}


def survive(kind: Kind, data: bytes, content: dict[str, Any]) -> str:
    """Everything that the server does with one client's answer, beside those of two honest ones, in at most 5 s.

    Returns:
        Why it was refused; empty where it was taken.

    Raises:
        AssertionError, and whatever else it should not: a finding.
    """
    began, expected = time.process_time(), skeleton(kind.message)
    asked = PendingOrder("mallory", 1, "1-1", 0.0, 0, 10**9, Given(expected, examples=6))
    with suppress(WireError):
        free = unpack(data)
        assert skeleton(unpack(pack(free))) == skeleton(free)
    _read(Reply(content, data))
    flaw = flaw_of(asked, Reply(content, data))
    for said in (flaw, flaw_of(asked, Reply(CONTENT, data))):
        assert said.isprintable() and len(said) <= 300
        assert "MemoryError" not in said and "memory" not in said, said
    if said:
        return said
    sent = [unpack(kind.data, expected), unpack(kind.data, expected), unpack(data, expected)]
    (*honest, flaw) = flaws(sent, [Given(expected)] * 3, 10.0)
    assert honest == ["", ""]
    if not flaw:
        _used(sent)
    assert time.process_time() - began < 5
    return flaw


def _read(reply: Reply) -> None:
    """All that the server reads of a reply, and writes into metrics.jsonl."""
    read: list[Any] = [reply.error, reply.failed, reply.score, reply.loss, reply.clients]
    with suppress(ValueError):
        recipe = reply.recipe()
        with suppress(Exception):  # as `server._finish` has it
            merges.tabulate({"mallory": recipe})
        read.append(recipe)
    json.dumps(read, ensure_ascii=False, allow_nan=False).encode()


def _used(sent: list[Any]) -> None:
    """As a method uses them: means of states, stacked tensors, and the result packed."""
    if isinstance(sent[0], State):
        assert mean(sent, [1, 1, 1]).is_finite()
        pack(mean(sent, [1, 1, 1]) - sent[-1])
    elif isinstance(sent[0], dict):
        for key in sent[0]:
            _used([message[key] for message in sent])
    elif isinstance(sent[0], torch.Tensor):
        torch.stack(sent)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """All places in a tree, as a container and a key."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [place for key, value in items for place in [(node, key), *_places(value)]]


def changed(tree: Any, draw: random.Random) -> Any:
    places = _places(tree)
    if not places:
        return deepcopy(draw.choice(_HOSTILE))
    holder, key = draw.choice(places)
    how = draw.randrange(7)
    if how == 0:
        del holder[key]
    elif how == 1:
        holder[key] = deepcopy(draw.choice(_HOSTILE))
    elif how == 2:
        other, at = draw.choice(places)
        holder[key], other[at] = other[at], holder[key]
        if len(json.dumps(tree, skipkeys=True, default=str)) > 10**6:  # a place in itself raises ValueError above
            return deepcopy(draw.choice(_HOSTILE))
    elif how == 3 and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(holder[key])))
    elif how == 4 and isinstance(holder, list):
        draw.shuffle(holder)
    elif how == 5:
        for _ in range(draw.choice((1, 3, 150, 700))):
            holder[key] = [holder[key]] if draw.random() < 0.7 else {"d": [["a", holder[key]]]}
    elif isinstance(holder[key], bool | int | float):
        holder[key] = holder[key] + draw.choice((-1, 1, 0.5, 2**40))
    else:
        holder[key] = str(holder[key])[:100]
    return tree


def changed_tensor(header: Any, draw: random.Random) -> Any:
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return header
    name = draw.choice(names)
    how, entry = draw.randrange(6), header[name]
    if how == 0 or not isinstance(entry, dict) or "shape" not in entry:
        header.pop(name)
    elif how == 1:
        entry["dtype"] = draw.choice(_DTYPES)
    elif how == 2:
        entry["shape"] = draw.choice(([], [1], [0], [-1], [2**40, 0], ["a"], [2.0], [*entry["shape"], 1]))
    elif how == 3:
        entry["data_offsets"] = draw.choice(([0, 0], [0, 8], [8, 0], [0, 2**62], [-4, 4], ["0", 4], []))
    elif how == 4:
        header[draw.choice(["9", "a", "\ud800", ""])] = dict(entry)
    else:
        other = draw.choice(names)
        header[name], header[other] = header[other], header[name]
    return header


def _spoil_numbers(header: Any, body: bytearray, draw: random.Random) -> None:
    if len(body) < 8:
        return
    start = draw.randrange(0, len(body) - 7) & ~3
    bits = (0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001, draw.getrandbits(32))
    body[start : start + 4] = struct.pack("<I", draw.choice(bits))


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    spoilt, how = bytearray(data), draw.randrange(5)
    at = draw.randrange(len(spoilt))
    if how == 0:
        return bytes(spoilt[:at])
    if how == 1:
        spoilt[at] ^= 1 << draw.randrange(8)
    elif how == 2:
        spoilt[:8] = draw.getrandbits(64).to_bytes(8, "little")
    elif how == 3:
        spoilt[at:at] = draw.randbytes(draw.randrange(1, 50))
    else:
        return draw.randbytes(draw.randrange(200))
    return bytes(spoilt)
