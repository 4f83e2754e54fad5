"""Merging as pure functions: POTARA's closed form, Fisher merging, mixtures and grids, by hand."""

import math
from typing import Any

import pytest
import torch
from tiny import product

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.merge.mean import WEIGHTS, best, mix_factors, mix_products
from llm_fed.merge.moments import Moments
from llm_fed.mergers.fisher_merging import fisher_merge
from llm_fed.mergers.potara import Traces, correlations, cross_variances, sweep, traces, variances
from llm_fed.state import State


def float64(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Three examples, two coordinates; (model, example, coordinate).
GRADIENTS = float64([[1.0, 2.0], [2.0, 0.0], [3.0, 1.0]], [[2.0, 1.0], [2.0, 1.0], [5.0, 4.0]])


def test_two_coordinates_by_hand():
    """POTARA paper, Eq. 19, 54-59 and 17, without damping.

    fed    k=1: g = 1, 2, 3: F = 14/3, mean 2, deviations -1, 0, 1, variance 2/3, Sigma = 3/14
           k=2: g = 2, 0, 1: F = 5/3, mean 1, deviations 1, -1, 0, variance 2/3, Sigma = 3/5
    local  k=1: g = 2, 2, 5: F = 33/3 = 11, mean 3, deviations -1, -1, 2, variance 2, Sigma = 1/11
           k=2: g = 1, 1, 4: F = 18/3 = 6, mean 2, deviations -1, -1, 2, variance 2, Sigma = 1/6
    covariance k=1: (1 + 0 + 2)/3 = 1; k=2: (-1 + 1 + 0)/3 = 0
    rho k=1: 1/sqrt(4/3) = 0.866; its bound (Eq. 58): sqrt((1/11) / (3/14)) = sqrt(14/33) = 0.6513, so it is clipped;
        k=2: 0
    cross k=1: at the bound it is the smaller Sigma, 1/11; k=2: 0
    a = 3/14 + 3/5 = 57/70; b = 1/11 + 1/6 = 17/66; c = 1/11
    lambda_fed = (17/66 - 6/66) / (57/70 + 17/66 - 12/66) = (1/6) / (57/70 + 5/66)
    """
    moments = Moments.of(GRADIENTS)
    close = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(moments.fisher, float64([14 / 3, 5 / 3], [11, 6]), **close)
    torch.testing.assert_close(moments.variance, float64([2 / 3, 2 / 3], [2, 2]), **close)
    torch.testing.assert_close(correlations(moments), float64(math.sqrt(3) / 2, 0), **close)
    sigma = variances(moments.fisher, 0.0)
    torch.testing.assert_close(cross_variances(correlations(moments), sigma), float64(1 / 11, 0), **close)
    found = traces(moments, moments.fisher, 0.0)
    assert (found.a, found.b, found.c) == pytest.approx((57 / 70, 17 / 66, 1 / 11), rel=1e-14)
    assert found.weight == pytest.approx((1 / 6) / (57 / 70 + 5 / 66), rel=1e-14)
    # The trace of Eq. 13 at that weight is below both parents' (Eq. 18), and not lower a little to the side.

    def at(w: float) -> float:
        return w**2 * found.a + (1 - w) ** 2 * found.b + 2 * w * (1 - w) * found.c

    assert at(found.weight) < min(found.a, found.b, at(found.weight - 0.01), at(found.weight + 0.01))


def test_correlation_below_its_bound_is_not_clipped():
    """rho = 0.5 and equal Sigmas (bound 1): the cross variance is half of Sigma. A negative rho counts as 0."""
    sigma = float64([0.25, 0.25], [0.25, 0.25])
    torch.testing.assert_close(cross_variances(float64(0.5, -0.7), sigma), float64(0.125, 0.0), rtol=0, atol=1e-15)


def test_damping_by_hand():
    """F_fed = 14/3 and 5/3 has mean 19/6; with damping 0.6 each gains 1.9: Sigma = 1/(14/3 + 1.9) and 1/(5/3 + 1.9)."""
    sigma = variances(Moments.of(GRADIENTS).fisher, 0.6)
    torch.testing.assert_close(sigma[0], float64(1 / (14 / 3 + 1.9), 1 / (5 / 3 + 1.9)), rtol=1e-14, atol=0)


def test_damping_bounds_the_trace():
    """One coordinate without gradient makes the plain trace infinite; damped it is at most P / (damping * mean F)."""
    moments = Moments.of(float64([[1.0, 0.0], [2.0, 0.0]], [[1.0, 1.0], [1.0, 3.0]]))
    assert math.isinf(traces(moments, moments.fisher, 0.0).a)
    found = traces(moments, moments.fisher, 1e-3)
    assert found.a == pytest.approx(1 / (2.5 + 1.25e-3) + 1 / 1.25e-3) and 0 < found.weight < 1e-2
    assert sweep(moments, moments.fisher)["0.1"] > sweep(moments, moments.fisher)["1e-05"]


@pytest.mark.parametrize(
    ("a", "b", "c", "weight"),
    [
        (3.0, 3.0, 1.0, 0.5),  # equally sure
        (1.0, 3.0, 0.0, 0.75),  # independent: inversely to the variances
        (1.0, 3.0, 1.0, 1.0),  # nothing left that the local model adds
        (3.0, 1.0, 1.0, 0.0),
        (2.0, 2.0, 2.0, 0.5),  # a + b - 2c = 0
        (0.1 + 0.2, 0.3, 0.3, 0.5),  # the same, but for rounding
        (math.inf, 1.0, 0.0, 0.0),
        (1.0, math.inf, 0.0, 1.0),
        (math.inf, math.inf, 0.0, 0.5),
    ],
)
def test_weight_of_traces(a, b, c, weight):
    assert Traces(a, b, c).weight == pytest.approx(weight, abs=1e-12)


def test_models_without_any_gradient():
    """The Fisher information of an adapter that knows its examples by heart is zero: it gets no weight."""
    nothing, something = torch.zeros(3, 2), torch.tensor([[1.0, 2.0], [2.0, 0.0], [3.0, 1.0]])
    for fed, local, weight in ((something, nothing, 1.0), (nothing, something, 0.0), (nothing, nothing, 0.5)):
        moments = Moments.of(torch.stack([fed, local]))
        assert traces(moments, moments.fisher, 1e-3).weight == weight
        assert correlations(moments).tolist() == [0.0, 0.0]


def test_equal_models_and_chosen_coordinates():
    rows = torch.randn(40, 6, generator=generator(0), dtype=torch.float64)
    same = Moments.of(torch.stack([rows, rows]))
    assert traces(same, same.fisher, 1e-3).weight == 0.5
    moments = Moments.of(torch.stack([rows, rows.roll(1, 1) * 2]))
    part = Moments.of(torch.stack([rows, rows.roll(1, 1) * 2])[:, :, [0, 1, 4, 5]])
    found = traces(moments, moments.fisher, 1e-2, [slice(0, 2), slice(4, 6)])
    expected = traces(part, part.fisher, 1e-2)
    assert (found.a, found.b, found.c) == pytest.approx((expected.a, expected.b, expected.c), rel=1e-12)


def adapter(seed: int, rank: int = 2) -> State:
    draws = generator(seed)
    return State.of(
        {
            "x.lora_A": torch.randn(rank, 5, generator=draws, dtype=torch.float64),
            "x.lora_B": torch.randn(4, rank, generator=draws, dtype=torch.float64),
            "y.lora_A": torch.randn(rank, 3, generator=draws, dtype=torch.float64),
            "y.lora_B": torch.randn(6, rank, generator=draws, dtype=torch.float64),
        }
    )


def test_mixing_factors_and_products():
    fed, local = adapter(0), adapter(1)
    mixed = mix_factors(fed, local, {"lora_A": 0.25, "lora_B": 0.75})
    torch.testing.assert_close(mixed["x.lora_A"], 0.25 * fed["x.lora_A"] + 0.75 * local["x.lora_A"])
    torch.testing.assert_close(mixed["y.lora_B"], 0.75 * fed["y.lora_B"] + 0.25 * local["y.lora_B"])
    assert mix_factors(fed, local, 1.0).equal(fed) and mix_factors(fed, local, 0.0).equal(local)
    stacked = mix_products(fed, local, 0.3)
    assert stacked["x.lora_A"].shape == (4, 5) and stacked["x.lora_B"].shape == (4, 4)
    for layer in ("x", "y"):  # Eq. 3 exactly, which mixing the factors is not
        expected = 0.3 * product(fed, layer) + 0.7 * product(local, layer)
        torch.testing.assert_close(product(stacked, layer), expected)
        assert not torch.allclose(product(mix_factors(fed, local, 0.3), layer), expected)


def test_fisher_merging_by_hand():
    """theta = 1 and 5 with F = 3 and 1: (3*1 + 1*5)/4 = 2. Where no F says anything: the mean. Damping pulls to it."""
    one, other = State.of({"w": float64(1.0, 1.0)}), State.of({"w": float64(5.0, 5.0)})
    fisher = float64([3.0, 0.0], [1.0, 0.0])
    assert fisher_merge([one, other], fisher, 0.0)["w"].tolist() == [2.0, 3.0]
    # mean(F) = 1, damping 0.5: (3.5*1 + 1.5*5)/5 = 2.2
    assert fisher_merge([one, other], fisher, 0.5)["w"].tolist() == pytest.approx([2.2, 3.0])
    assert fisher_merge([one, other], 0 * fisher, 0.5)["w"].tolist() == [3.0, 3.0]


def test_ties_of_the_grid_go_to_the_middle():
    assert WEIGHTS == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert best({0.0: 1.0, 0.2: 3.0, 0.9: 3.0}) == 0.2
    assert best({0.4: 3.0, 0.6: 3.0, 0.5: 2.0}) == 0.6
    assert best(dict.fromkeys(WEIGHTS, 7.0)) == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "potara", "damping": -1.0}, "damping"),
        ({"name": "potara", "samples": 0}, "samples"),
        ({"name": "potara", "space": "delta", "per_factor": True}, "per_factor"),
        ({"name": "mean", "weight": 1.5}, "weight"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=f"method.{message}"):
        methods.build(settings)
