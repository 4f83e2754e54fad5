"""Bytes that no honest party sends: each is refused in one line, before it costs more than what was asked for."""

import json
import os
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every
import hostile
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from llm_fed.federation.uploads import flaws
from llm_fed.network.link import PendingOrder, Reply, flaw_of
from llm_fed.state import State
from llm_fed.state.lowrank import LowRank
from llm_fed.state.outline import difference, infinite, size_of, skeleton
from llm_fed.state.roles import Given
from llm_fed.state.wire import EXPANSION, WireError, pack, unpack

STATE = State.of({"a": torch.ones(2, 3), "b": torch.ones(4)}, {"mean": torch.ones(2)})
LAYOUT: list[Any] = [["a", "b"], [[2, 3], [4]]]
EXTRAS: list[Any] = [["mean", {"t": "1"}]]


def in_child(job: Callable[[], None]) -> int:
    """The job in a process of its own; how that ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            job()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def message(tree: Any, **tensors: torch.Tensor) -> bytes:
    return save({key.strip("_"): value for key, value in tensors.items()}, metadata={"llm_fed": json.dumps(tree)})


def state(layout: Any = None, row: torch.Tensor | None = None, extras: Any = None, **more: Any) -> bytes:
    tree = {"s": layout or LAYOUT, "row": {"t": "0"}, "extras": EXTRAS if extras is None else extras, **more}
    row = torch.ones(10) if row is None else row
    return message(tree, _0=row, **({"_1": torch.ones(2)} if extras is None else {}))


def raw(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


def low_rank(*pair: torch.Tensor, shape: tuple[int, ...] = (4, 4), **more: Any) -> bytes:
    rest = {"s": [[], []], "row": {"t": "9"}, "extras": []}
    factors = [["w", [{"t": str(number)} for number in range(len(pair))]]]
    tree = {"l": [["w"], [list(shape)]], "factors": factors, "rest": rest, **more}
    return message(tree, _9=torch.zeros(0), **{f"_{number}": factor for number, factor in enumerate(pair)})


FACTORS = (torch.ones(4, 1), torch.ones(1, 4))
INT8 = torch.ones(10, dtype=torch.int8)


def nested(levels: int) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = {"d": [["a", tree]]}
    return tree


FOUR_BITS = b'{"__metadata__":{"llm_fed":"1"},"0":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
ONCE_FELL = {  # what it is, and a word of why it is refused
    "a float8 row": (state(row=torch.ones(10).to(torch.float8_e4m3fn)), "float8"),
    "an int8 row": (state(row=torch.ones(10, dtype=torch.int8)), "a row of torch.int8"),
    "a bool row": (state(row=torch.ones(10, dtype=torch.bool)), "a row of torch.bool"),
    "a row of complex numbers": (state(row=torch.ones(10, dtype=torch.complex64)), "complex"),
    "text among the extras": (state(extras=[["mean", "text"]]), "a malformed node of a tensor"),
    "a state among the extras": (state(extras=[["mean", {"d": []}]]), "a malformed node of a tensor"),
    "permuted entries": (state([["b", "a"], [[4], [2, 3]]]), "in another order"),
    "a name twice, once empty": (state([["a", "b", "a"], [[2, 3], [4], [0]]]), "a twice"),
    "a tensor in two places": (state(extras=[["mean", {"t": "0"}]]), "belongs to two places"),
    "an extra twice": (state(extras=[["mean", {"t": "1"}]] * 2), "mean twice"),
    "a float shape": (state([["a", "b"], [[2.0, 3], [4]]]), "a malformed shape"),
    "a bool shape": (state([["a", "b", "c"], [[2, 3], [3], [True]]]), "a malformed shape"),
    "a negative shape": (state([["a", "b"], [[-2, -3], [4]]]), "a malformed shape"),
    "text in a shape": (state([["a", "b"], [["x", 10**9, 5], [4]]]), "a malformed shape"),
    "a shape beyond 64 bits": (state([["a", "b", "c"], [[2, 3], [4], [2**70, 0]]]), "too large"),
    "more names than shapes": (state([["a", "b", "c"], [[2, 3], [4]]]), "a malformed layout"),
    "a name that is a number": (state([["a", 5], [[2, 3], [4]]]), "a name that is not a text"),
    "a name with a lone surrogate": (state([["a", "\ud800"], [[2, 3], [4]]]), "surrogates"),
    "empty factors": (low_rank(shape=(4, 4)), "not a message"),
    "factors of rank 0": (low_rank(torch.ones(4, 0), torch.ones(0, 4)), "factors of [4, 0]"),
    "factors of vectors": (low_rank(torch.ones(4), torch.ones(4)), "not a message"),
    "factors of integers": (low_rank(*(factor.long() for factor in FACTORS)), "factors of torch.int64"),
    "a rest that is low-rank": (low_rank(*FACTORS, rest={"l": [[], []]}), "an unknown kind of node"),
    "scales of an int8 row": (state(row=INT8, scales=None, dtype="float32"), "an unknown kind of node"),
    "an int8 row as float32": (state(row=INT8, dtype="float32"), "a row of torch.int8 as another dtype"),
    "an unknown node": (message({"x": 1}), "an unknown kind of node"),
    "a tensor too many": (message({"d": []}, _0=torch.ones(1)), "belong to nothing"),
    "a key twice": (message({"d": [["a", 1], ["a", 2]]}), "a twice"),
    "a number of 400 digits": (message({"d": [["a", 10**400]]}), "more than 64 bits"),
    "deep JSON": (raw(b"[" * 50_000), "RecursionError"),
    "deep JSON inside": (message(1).replace(b'"1"', b'"%s1%s"' % (b"[" * 500, b"]" * 500)), "not a message"),
    "deep dicts": (message(nested(210)), "deeper than 200"),
    "no header": (raw(b"[]"), "TypeError"),
    "a header that is a number": (raw(b"3"), "TypeError"),
    "no metadata": (save({"0": torch.ones(1)}), "__metadata__"),
    "a length of 2**63": (raw(b"{}", 2**63), "not a message"),
    "nothing": (b"", "not a message"),
    "an unknown dtype": (raw(FOUR_BITS) + b"a", "not a message"),
}  # fmt: skip


def test_the_form_that_they_differ_from_is_taken():
    """Without this, refusals prove nothing."""
    assert unpack(state(), skeleton(STATE)).equal(STATE)
    encoded = unpack(pack(STATE, "bfloat16"), skeleton(STATE))
    assert encoded.row.dtype == torch.float32 and encoded.equal(STATE)
    assert torch.equal(unpack(low_rank(*FACTORS))["w"], torch.ones(4, 4))


@pytest.mark.parametrize("what", ONCE_FELL)
def test_what_once_ended_the_server_is_refused_in_one_line(what):
    data, reason = ONCE_FELL[what]
    asked = PendingOrder("mallory", 1, "1", 0.0, 0, 10**9, Given(skeleton(STATE), examples=6))
    said = flaw_of(asked, Reply({"ask": "1", "examples": 6}, data))
    assert reason in said and said.isprintable() and len(said) <= 300
    for expected in (skeleton(STATE), None):
        if expected or what != "permuted entries":  # to whoever expects nothing these are good ones
            with pytest.raises(WireError):
                unpack(data, expected)


def test_a_state_beside_an_entry_that_is_none_is_found_in_the_uploads_of_a_round():
    """Norms are those of what has no other flaw: of text there is none."""
    odd = State(STATE.layout, STATE.row, {"mean": "text"})  # type: ignore[dict-item]
    assert flaws([STATE, odd, WireError("why")], [Given(skeleton(STATE))] * 3, 10.0) == [
        "", "upload.extras.mean is str, expected {'dtype': 'torch.float32', 'shape': [2]}", "why"
    ]  # fmt: skip


def test_entries_have_an_order_and_dicts_have_none():
    one, other = State.of({"a": torch.ones(1), "b": torch.ones(1)}), State.of({"b": torch.ones(1), "a": torch.ones(1)})
    assert "another order" in difference(skeleton(other), skeleton(one), "upload")
    assert "another order" in difference(skeleton([other])[0], skeleton([one])[0], "upload")
    assert "another order" in difference(skeleton({"x": other}), skeleton({"x": one}), "upload")
    assert not difference({"x": "int", "y": "int"}, {"y": "int", "x": "int"}, "upload")


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_each_form_in_which_a_message_may_travel_is_taken(kind):
    sent = hostile.KINDS[kind]
    wanted = skeleton(sent.message)
    assert skeleton(unpack(sent.data, wanted)) == wanted and not difference(wanted, wanted, "x")
    assert size_of(wanted) >= sum(part.numel() for part in load(sent.data).values() if part.is_floating_point())
    honest = Reply(hostile.CONTENT, sent.data)
    assert not flaw_of(PendingOrder("ada", 1, "1-1", 0.0, 0, 10**9, Given(wanted, examples=6)), honest)


BOMBS = {  # bytes, and what they would have taken
    "text in a shape": 'state([["x"], [["ab", 3 * 2**30]]])',
    "factors": "low_rank(torch.ones(40_000, 1), torch.ones(1, 40_000), shape=(40_000, 40_000))",
    "one row in many states": 'message([{"s": [["a"], [[2**20]]], "row": {"t": "0"}, "extras": []}] * 2000, '
    "_0=torch.ones(2**20, dtype=torch.int8).float())",
}


def test_nothing_is_decoded_that_is_larger_than_what_was_asked_for(tmp_path):
    """In a process that may take 256 MiB more: it is refused for what it is, and not for want of memory."""
    made = [eval(bomb) for bomb in BOMBS.values()]

    def unpacked() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (pages + 2**28, pages + 2**28))
        for data in made:
            for expected in (None, skeleton(STATE)):
                with (tmp_path / "said").open("a") as said:
                    try:
                        unpack(data, expected)
                        said.write("taken\n")
                    except (WireError, MemoryError, RuntimeError) as error:
                        said.write(f"{type(error).__name__}: {error}\n")

    assert in_child(unpacked) == 0
    said = (tmp_path / "said").read_text().splitlines()
    assert len(said) == 2 * len(BOMBS)
    assert all(line.startswith("WireError: ") and "emory" not in line for line in said), said


def test_factors_may_become_as_much_as_was_asked_for_and_else_a_multiple_of_what_came():
    whole = State.of({"w": torch.ones(3000, 3000)})
    sent = pack(LowRank(whole.layout, {"w": (torch.ones(3000, 1), torch.ones(1, 3000))}, State.of({})))
    assert len(sent) * EXPANSION < 2 * 4 * whole.layout.size
    assert isinstance(unpack(sent, skeleton(whole)), LowRank)
    with pytest.raises(WireError, match="times what came"):
        unpack(sent)


def test_the_first_place_that_is_not_finite_is_found():
    nan = torch.tensor([1.0, float("nan")])
    assert infinite({"a": [1, STATE], "b": {"c": State.of({"x": nan})}}, "state") == "state.b.c"
    assert infinite([State(STATE.layout, STATE.row, {"mean": nan})], "state") == "state.0.mean"
    assert infinite({"a": nan}, "s") == "s.a" and infinite([1.0, float("inf")], "s") == "s.1"
    assert infinite({"a": STATE, "b": None, "c": "nan", "d": 10**30, "e": torch.tensor([1])}, "s") == ""


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@example(kind="update", seed=0, beside={"recipe": {"lambda_fed": [1]}, "error": [[]], "loss": 10**400})
@given(
    kind=st.sampled_from(sorted(hostile.KINDS)),
    seed=st.integers(0, 2**32),
    beside=st.dictionaries(st.sampled_from(sorted(hostile.CLAIMS)), st.integers() | st.text() | st.floats()),
)
def test_no_answer_of_any_kind_ends_the_server(kind, seed, beside):
    """Real answers, changed in their structure, tensors or bytes."""
    attack(hostile.KINDS[kind], random.Random(seed), beside)


def attack(kind: hostile.Kind, draw: random.Random, beside: dict[str, Any]) -> None:
    try:
        data, content = hostile.mutated(kind, draw), hostile.claimed(draw) | beside
    except Exception:
        return  # the change is none that can be written
    hostile.survive(kind, data, content)


@pytest.mark.slow
@pytest.mark.parametrize("kind", hostile.KINDS)
def test_none_of_many_answers_ends_the_server(kind):
    with every.bounded_memory():
        every.passes(range(10_000), lambda number: attack(hostile.KINDS[kind], random.Random(f"many-{number}"), {}))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.binary(max_size=400))
def test_no_bytes_end_the_server(data):
    hostile.survive(hostile.KINDS["update"], data, dict(hostile.CONTENT))
