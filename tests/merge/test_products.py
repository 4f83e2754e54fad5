"""Two adapters merged as differences of weights: sums, arcs, TIES and DARE."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.merge_utils import ties as peft_ties

from llm_fed.merge.products import combined, factored, layers
from llm_fed.mergers.dare import dare
from llm_fed.mergers.slerp import arc
from llm_fed.mergers.task_arithmetic import task_arithmetic
from llm_fed.mergers.ties import elected
from llm_fed.state import State

SHAPES = {"layers.0.q": (5, 7), "layers.1.v": (6, 3)}  # (out, in); rank 2, of which the second is no wider than 3


def adapter(seed: int, head: bool = False) -> State:
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    entries = {}
    for layer, (rows, columns) in SHAPES.items():
        entries |= {f"{layer}.lora_A": normal(2, columns), f"{layer}.lora_B": normal(rows, 2)}
    return State.of(entries | ({"classifier.weight": normal(3, 4)} if head else {}))


def products(state: State) -> dict[str, torch.Tensor]:
    return {layer: state[b] @ state[a] for layer, a, b in layers(state)}


def gram(*updates: torch.Tensor) -> torch.Tensor:
    flat = torch.stack(updates).flatten(1)
    return flat @ flat.T


def test_a_combination_is_exact():
    one, other = adapter(0, head=True), adapter(1, head=True)
    found = combined([one, other], lambda products: (0.25, float(products[1, 1].sqrt())))
    for layer, product in products(found).items():
        second = products(other)[layer]
        torch.testing.assert_close(product, 0.25 * products(one)[layer] + second.norm() * second, rtol=0, atol=1e-12)
        assert len(found[f"{layer}.lora_A"]) == 4
    torch.testing.assert_close(found["classifier.weight"], (one["classifier.weight"] + other["classifier.weight"]) / 2)


def test_what_a_product_loses():
    """Nothing of what has at most twice the rank; of the rest the smallest singular values."""
    one, other = adapter(0), adapter(1)
    found, lost = factored([one, other], lambda layer, both: both[0] - 3 * both[1])
    assert lost < 1e-12
    for layer, product in products(found).items():
        wanted = products(one)[layer] - 3 * products(other)[layer]
        torch.testing.assert_close(product, wanted, rtol=0, atol=1e-12)
    dense = {
        layer: torch.randn(shape, generator=torch.Generator().manual_seed(3)).double()
        for layer, shape in SHAPES.items()
    }
    found, lost = factored([one, other], lambda layer, both: dense[layer])
    away = math.hypot(*(float((dense[layer] - product).norm()) for layer, product in products(found).items()))
    whole = math.hypot(*(float(value.norm()) for value in dense.values()))
    assert lost == pytest.approx(away / whole) and 0.01 < lost < 0.5
    assert factored([one, other], lambda layer, both: 0 * both[0])[1] == 0.0


def test_ties_by_hand():
    """Kept: 3 of 5 entries of each. Signs by the larger sum: +, -, +, 0, +; the mean of those that agree."""
    differences = torch.tensor([[4.0, -3, 2, 1, 0], [2, 5, 0.5, 1, 3]])
    # trimmed: 4 -3 2 0 0 and 2 5 0 0 3: sums 6, 2, 2, 0, 3
    assert elected(differences, 0.6).tolist() == [3, 5, 2, 0, 3]
    assert elected(differences, 1.0).tolist() == [3, 5, 1.25, 1, 3]


@given(seed=st.integers(0, 2**31), density=st.sampled_from([0.1, 0.25, 0.5, 0.75]))
def test_ties_is_pefts(seed, density):
    differences = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(elected(differences, density), peft_ties(list(differences), torch.ones(2), density))


@given(seed=st.integers(0, 2**31), weight=st.floats(0, 1))
def test_an_arc_keeps_the_length_and_turns_evenly(seed, weight):
    one, other = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one, other = one / one.norm(), other / other.norm()
    first, second = arc(gram(one, other), weight)
    mixed = first * one + second * other
    angle = math.acos(float((one * other).sum()))
    assert float(mixed.norm()) == pytest.approx(1)
    assert math.acos(min(1, float((mixed * other).sum()))) == pytest.approx(weight * angle, abs=1e-6)


def test_an_arc_without_an_angle_is_a_line():
    one = torch.ones(3, 3)
    for other in (one, 2 * one, -one, 0 * one):
        assert arc(gram(one, other), 0.25) == (0.25, 0.75)


def test_dare_keeps_its_share_and_the_mean():
    """Each entry is dropped or divided by what is kept; client and layer draw for themselves."""
    one, other = (State.of({"l.lora_A": torch.eye(60).double(), "l.lora_B": torch.ones(60, 60).double()}) for _ in "ab")

    def merged(id: str) -> torch.Tensor:
        state, recipe = dare(SimpleNamespace(id=id, seed=0), one, other, drop=0.75, scaling=0.5)
        assert recipe["lost"] < 1e-6  # twice the rank is the whole layer
        return products(state)["l"]

    found = merged("a")
    values = (found / 2).round(decimals=6)  # each of the two counts one half, over a quarter that is kept
    assert set(values.unique().tolist()) <= {0.0, 1.0, 2.0}
    assert float(found.mean()) == pytest.approx(1.0, abs=0.1)
    assert torch.allclose(found, merged("a")) and not torch.allclose(found, merged("b"))


def test_task_arithmetic_with_a_half_is_the_mean():
    one, other = adapter(0), adapter(1)
    merged, _ = task_arithmetic(None, one, other, scaling=0.5)
    for layer, product in products(merged).items():
        torch.testing.assert_close(product, (products(one)[layer] + products(other)[layer]) / 2, rtol=0, atol=1e-12)
