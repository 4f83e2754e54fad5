"""Updates that travel as factors: the truncation, the wire, and how FedKD keeps server and clients in step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from unlike import LR, Federation, of_classes

from llm_fed.federation.uploads import flaws
from llm_fed.methods.fedkd import FedKD
from llm_fed.state import State
from llm_fed.state.lowrank import LowRank, truncated
from llm_fed.state.outline import skeleton
from llm_fed.state.roles import Given
from llm_fed.state.wire import pack, unpack

ARCHITECTURES = ("", "resnet-9")
PARTS = (of_classes(0, 1, 1, 0, 1), of_classes(1, 1, 2), of_classes(3))


def by_svd(matrix: Tensor, energy: float) -> tuple[Tensor, int]:
    """The truncation and its rank as anyone would write them."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    rank = 1
    while (s[:rank] ** 2).sum() < energy * (s**2).sum():
        rank += 1
    return u[:, :rank] @ torch.diag(s[:rank]) @ v[:rank], rank


def falling(*shape: int) -> Tensor:
    """A matrix whose singular values halve."""
    draws = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(draws, full_matrices=False)
    return u @ torch.diag(0.5 ** torch.arange(min(shape), dtype=torch.float64)) @ v


@pytest.mark.parametrize("energy", [0.5, 0.8, 0.95, 0.98, 0.9999])
def test_truncation_is_that_of_the_singular_values(energy):
    wide, tall, conv = falling(12, 30), falling(30, 12), falling(20, 45).view(20, 5, 3, 3)
    extras = {"running_mean": torch.ones(3, dtype=torch.float64)}
    state = State.of({"wide": wide, "bias": torch.ones(4, dtype=torch.float64), "tall": tall, "conv": conv}, extras)
    found = truncated(state, energy)
    for name in ("wide", "tall", "conv"):
        expected, rank = by_svd(state[name].flatten(1), energy)
        assert found.factors[name][0].shape[1] == found.factors[name][1].shape[0] == rank
        torch.testing.assert_close(found[name].flatten(1), expected, rtol=0, atol=1e-12)
    assert torch.equal(found["bias"], state["bias"]) and found.layout == state.layout
    back = unpack(pack(found))
    assert isinstance(back, LowRank) and back.equal(found) and pack(back) == pack(found)
    assert skeleton(found) == skeleton(state) and not flaws([back], [Given(skeleton(state))], None)[0]
    kept = 4 + 3 + sum(left.numel() + right.numel() for left, right in found.factors.values())
    assert 8 * kept < len(pack(found)) < 8 * kept + 1600 and len(pack(found)) < len(pack(state)) - 2000


def test_no_update_is_lost():
    """Factors that would be no smaller are not made; a matrix of rank 1 keeps it, and zero stays zero."""
    noise = torch.randn(10, 11, generator=torch.Generator().manual_seed(0))
    state = State.of({"noise": noise, "thin": torch.ones(1, 50), "one": torch.ones(9, 7), "zero": torch.zeros(6, 8)})
    found = truncated(state, 0.95)
    assert set(found.factors) == {"one", "zero"} and found.factors["one"][0].shape == (9, 1)
    torch.testing.assert_close(found.row, state.row, rtol=0, atol=1e-6)
    assert torch.equal(found["noise"], noise) and not found["zero"].any()
    everything = truncated(state, 1)
    assert everything.equal(state) and not everything.factors


def test_factors_that_do_not_fit_are_no_state():
    state = truncated(State.of({"a": falling(12, 30), "b": torch.ones(2, dtype=torch.float64)}), 0.9)
    left, right = state.factors["a"]
    for factors, rest in (
        ({"a": (left[:5], right)}, state.rest),
        ({"a": (left, right[:, :5])}, state.rest),
        ({"a": (left[:, :1], right)}, state.rest),
        ({"a": (right.T, left.T)}, state.rest),
        ({}, state.rest),
        ({"a": (left, right)}, State.of({})),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            LowRank(state.layout, factors, rest)


def test_fedkd_keeps_more_energy_from_round_to_round():
    """Of four rounds: 0.95 + 0.03 / 4 in the first, 0.98 in the last."""
    run = Federation(FedKD(), of_classes(0, 1))
    for round, energy in ((1, 0.9575), (2, 0.965), (4, 0.98)):
        run.server.begin(round, LR)
        assert FedKD().energy_at(run.server) == pytest.approx(energy, abs=1e-12)


def test_fedkd_sends_steps_both_ways_and_all_have_the_same_small_model():
    """Bit for bit; a step and an update take less than half of a model."""
    run = Federation(FedKD(energy=0.5, energy_end=0.6), PARTS[0], PARTS[1], architectures=ARCHITECTURES)
    assert all(run.message(name)["whole"] for name in run.clients)
    whole = len(pack(run.message("c0")))
    for round in (1, 2, 3):
        uploads = run.round(round)
        updates = [upload.content["update"] for upload in uploads]
        weights = torch.tensor([5 / 8, 3 / 8], dtype=torch.float64)
        mean = weights @ torch.stack([update.row for update in updates])
        expected = by_svd(State(updates[0].layout, mean)["small.hidden.weight"], 0.5 + 0.1 * round / 4)[0]
        torch.testing.assert_close(run.state["step"]["small.hidden.weight"], expected, rtol=0, atol=1e-10)
        for name in run.clients:
            message = run.message(name)
            assert not message["whole"] and len(pack(message)) < whole / 2
            assert len(pack(uploads[0].content)) < whole / 2
            personal = run.personal(name)
            for entry in run.state["model"]:
                assert torch.equal(personal[entry], run.state["model"][entry])


def test_fedkd_sends_the_whole_model_to_who_missed_a_step():
    run = Federation(FedKD(energy=0.5, energy_end=0.6), *PARTS)
    run.round(1, "c0", "c1")
    assert [run.message(name)["whole"] for name in run.clients] == [False, False, True]
    late = run.ask(2, "c0")  # it now has version 1, of which the server hears nothing yet
    assert not run.message("c0")["whole"]
    model = run.state["model"]
    personal = run.personal("c0")  # it does not take the step twice
    assert torch.equal(personal["small.head.weight"], model["small.head.weight"])
    run.round(2, "c1", "c2")
    assert [run.message(name)["whole"] for name in run.clients] == [True, False, False]
    run.step(3, [replace(late[0], staleness=1)])
    assert [run.message(name)["whole"] for name in run.clients] == [True, True, True]
    for name in run.clients:
        assert torch.equal(run.personal(name)["small.head.weight"], run.state["model"]["small.head.weight"])
