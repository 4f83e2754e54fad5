"""State, stacking, means and the wire format."""

import pytest
import torch

from llm_fed.basics.errors import UserError
from llm_fed.merge import mean
from llm_fed.state import Layout, State, combine, stack
from llm_fed.state.wire import WireError, pack, unpack


def state(a: float, b: float, count: int = 0, running: float = 0.0) -> State:
    extras = {"count": torch.tensor(count), "running": torch.tensor([running])}
    return State.of({"x.lora_A": torch.full((2, 3), float(a)), "x.lora_B": torch.full((4,), float(b))}, extras)


def test_arithmetic_leaves_its_operands_alone_and_integers_where_they_are():
    left, right = state(1, 2, count=7, running=1.0), state(10, 20, count=9, running=3.0)
    total, half = left + right, 0.5 * (right - left)
    assert total["x.lora_A"].tolist() == [[11.0] * 3] * 2 and total["x.lora_B"].tolist() == [22.0] * 4
    assert half["x.lora_A"][0, 0] == 4.5 and half["x.lora_B"][0] == 9.0
    assert total.extras["count"] == 7 and total.extras["running"] == 4.0 and half.extras["running"] == 1.0
    assert left.equal(state(1, 2, count=7, running=1.0)) and right.equal(state(10, 20, count=9, running=3.0))


def test_mean_weighs_by_examples():
    """(1 * 1 + 3 * 5) / 4 = 4; (1 * 2 + 3 * 6) / 4 = 5; running (1 * 0 + 3 * 2) / 4 = 1.5."""
    merged = mean([state(1, 2, running=0.0), state(5, 6, running=2.0)], [1, 3])
    assert merged["x.lora_A"].unique().tolist() == [4.0] and merged["x.lora_B"].unique().tolist() == [5.0]
    assert merged.extras["running"] == 1.5
    assert mean([state(1, 2), state(5, 6)])["x.lora_A"][0, 0] == 3.0
    with pytest.raises(ValueError, match="sum to 0"):
        mean([state(1, 2)], [0])


def test_rows_stack_and_come_apart():
    states = [state(i, -i) for i in range(3)]
    rows = stack(states)
    assert rows.shape == (3, 10) and rows[2, 0] == 2
    back = [states[0].like(row) for row in rows]
    assert torch.equal(stack(back[1:]), rows[1:]) and torch.equal(stack([back[2], back[0]]), rows[[2, 0]])
    assert combine(back, torch.tensor([0.0, 1.0, 2.0]))["x.lora_A"][0, 0] == 5.0


def test_states_of_other_entries_do_not_mix():
    other = State.of({"x.lora_A": torch.zeros(2, 2), "x.lora_B": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"x.lora_A is \(2, 3\) here and \(2, 2\) there"):
        state(1, 2) + other
    with pytest.raises(ValueError, match="different entries"):
        stack([state(1, 2), other])


def test_entries_of_several_dtypes_are_refused():
    with pytest.raises(ValueError, match="one floating dtype, got torch.float32, torch.int64"):
        State.of({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.int64)})


def test_select_and_put_back():
    whole = state(1, 2)
    part = whole.select("lora_B$")
    assert list(part) == ["x.lora_B"] and part.layout.size == 4
    assert whole.updated(part * 3)["x.lora_B"].tolist() == [6.0] * 4 and whole["x.lora_B"].tolist() == [2.0] * 4
    with pytest.raises(UserError, match="'lora_C' matches none of 2 entries, e.g. x.lora"):
        whole.select("lora_C")
    layout = whole.layout
    assert layout.joined(layout.matching(".")) == [slice(0, 10)]
    assert layout.joined(layout.matching("B$")) == [slice(6, 10)]


def test_extras_ride_along():
    """Those of a part replace those of the whole, a selection keeps its own, a combination weighs the floating ones."""
    values, parts = torch.zeros(2), {"a.mean": torch.tensor([1.0]), "b.mean": torch.tensor([2.0])}
    whole = State.of({"a.x": values, "b.x": values}, {**parts, "a.count": torch.tensor(7)})
    other = State.of({"b.x": values}, {"b.mean": torch.tensor([9.0])})
    assert whole.select("^b").extras == {"b.mean": parts["b.mean"]} and not whole.pick(["a.x"]).extras
    assert {name: float(value) for name, value in whole.updated(other).extras.items()} == {
        "a.mean": 1.0, "b.mean": 9.0, "a.count": 7.0
    }  # fmt: skip
    for same in (whole.renamed("x", "y"), whole.like(whole.row + 1)):
        assert same.extras == whole.extras
    late = State(whole.layout, whole.row, {**whole.extras, "a.mean": torch.tensor([5.0]), "a.count": torch.tensor(8)})
    merged = combine([whole, late], torch.tensor([0.25, 0.5]))
    assert merged.extras["a.mean"] == 0.25 * 1 + 0.5 * 5 and merged.extras["a.count"] == 7
    assert not whole.equal(late) and not whole.equal(State(whole.layout, whole.row)) and whole.equal(1.0 * whole)


def test_wire_round_trip_shares_no_memory():
    message = {
        "soup": [state(1, 2), state(3, 4)],
        "logits": {"ä": torch.arange(3, dtype=torch.float64)},
        "half": State.of({"b": torch.ones(3, dtype=torch.bfloat16)}),
        "plain": [None, True, 3, 0.1, "text", {}],
    }
    data = pack(message)
    back = unpack(data)
    assert back["plain"] == message["plain"] and torch.equal(back["logits"]["ä"], message["logits"]["ä"])
    assert all(mine.equal(theirs) for mine, theirs in zip(back["soup"], message["soup"], strict=True))
    assert back["half"].row.dtype == torch.bfloat16
    back["soup"][0].row.zero_()
    assert message["soup"][0].row.sum() == 14
    assert pack(message) == data


def test_what_lies_in_the_same_memory_travels_as_often_as_it_is_there():
    """A server may hold one model twice; what is packed is as if each tensor had memory of its own."""
    whole = torch.arange(12.0)
    layout = Layout(("x",), ((3,),))
    message = [whole, whole[2:5], whole[None, 3:9].T, State(layout, whole[1:4], {"all": whole}), whole, whole[4:4]]
    apart = [
        State(one.layout, one.row.clone(), {name: value.clone() for name, value in one.extras.items()})
        if isinstance(one, State)
        else one.clone()
        for one in message
    ]
    assert pack(message) == pack(apart)
    model = state(1, 2)
    one, other = unpack(pack([model, model]))
    one.row.zero_()
    assert other.equal(model) and model.equal(state(1, 2))


def test_a_message_costs_its_numbers_and_a_header():
    """10 float32 numbers are 40 bytes; 1000 more are 4000 more, and the header grows by the digits only."""
    small = State.of({"x": torch.zeros(10)})
    large = State.of({"x": torch.zeros(1010)})
    assert 4000 <= len(pack(large)) - len(pack(small)) <= 4016
    assert len(pack(small)) < 40 + 300


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-5], lambda d: d[:20], lambda d: b"", lambda d: b"PK" + d[2:], lambda d: b"{}"]
)
def test_damaged_bytes_are_named(damage):
    with pytest.raises(WireError, match="not a message"):
        unpack(damage(pack(state(1, 2))))


def test_objects_do_not_travel():
    with pytest.raises(TypeError, match="object cannot travel"):
        pack({"x": object()})
    with pytest.raises(TypeError, match="string keys"):
        pack({1: 2})
