"""RoLoRA, FedRot-LoRA and FedSVD: whose factors travel, which products stay the same, and numbers derived by hand."""

import asyncio

import pytest
import torch
import toy
from battery import go
from torch import Tensor

from llm_fed import methods
from llm_fed.method import Upload
from llm_fed.methods.fedrot_lora import FedRotLoRA, turned
from llm_fed.methods.fedsvd import FedSVD, orthogonal
from llm_fed.methods.rolora import RoLoRA
from llm_fed.settings.config import ServerStepConfig
from llm_fed.state import State

A, B = "q.lora_A", "q.lora_B"


def adapter(seed: int, rank: int = 3, sides: tuple[int, int] = (7, 5)) -> State:
    draws = torch.Generator().manual_seed(seed)
    shapes = {A: (rank, sides[1]), B: (sides[0], rank)}
    return State.of({name: torch.randn(shape, generator=draws, dtype=torch.float64) for name, shape in shapes.items()})


def product(state: State) -> Tensor:
    return state[B] @ state[A]


def numbers(**entries: float) -> State:
    return State.of({f"q.lora_{name}": torch.tensor([value], dtype=torch.float64) for name, value in entries.items()})


def serve(method, state, uploads, round=1):
    server = toy.server()
    server.begin(round, 0.1)
    return asyncio.run(method.server_update(server, state, uploads))


def test_rolora_takes_turns_and_sends_what_it_trained(tmp_path):
    """Of three rounds the first and the last train B, the second A; each time the other factor stays to the bit. The
    answers after them are of a fourth."""
    run = go("rolora", tmp_path)
    states = [run.method.init(run.server)["model"]]
    for round in (1, 2, 3):
        states.append(go("rolora", tmp_path / str(round), rounds=round).state["model"])
    for round, (before, after) in enumerate(zip(states, states[1:], strict=False), 1):
        moved, frozen = ("lora_A", "lora_B") if round % 2 == 0 else ("lora_B", "lora_A")
        assert all(torch.equal(before[name], after[name]) for name in before if name.endswith(frozen))
        assert any(not torch.equal(before[name], after[name]) for name in before if name.endswith(moved))
    assert {name.rpartition(".")[2] for upload in run.uploads() for name in upload.content} == {"lora_A"}


def test_rolora_averages_each_turn_by_itself():
    """B: 1 + (1 * 4 + 3 * 8) / 4 = 8; a late answer of A: 2 + 5; the next turn is that of A."""
    uploads = [
        Upload("a", 1, 0, numbers(B=4.0)), Upload("b", 3, 0, numbers(B=8.0)), Upload("c", 7, 1, numbers(A=5.0)),
    ]  # fmt: skip
    after = serve(RoLoRA(), {"model": numbers(A=2.0, B=1.0), "turn": "lora_B"}, uploads)
    assert after["model"].equal(numbers(A=7.0, B=8.0)) and after["turn"] == "lora_A"
    assert serve(RoLoRA(), after, [])["turn"] == "lora_B"


@pytest.mark.parametrize("by_a", [True, False])
def test_a_turned_adapter_adds_the_same_and_lies_where_the_reference_does(by_a):
    """An adapter that is the reference turned by a rotation is turned back to it, exactly."""
    reference, theta = adapter(0), adapter(1)
    found = turned(theta, reference, by_a=by_a)
    torch.testing.assert_close(product(found), product(theta))
    side = A if by_a else B
    assert (found[side] - reference[side]).norm() < (theta[side] - reference[side]).norm()
    q, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    q = q * torch.linalg.det(q).sign()  # of an odd number of columns all signs
    away = State.of({A: q.T @ reference[A], B: reference[B] @ q})
    torch.testing.assert_close(turned(away, reference, by_a=by_a).row, reference.row)


def test_a_share_of_a_rotation():
    """Half of a right angle in the plane: (I + R) / 2 is closest to the rotation by 45 degrees."""
    reference = State.of({A: torch.eye(2).double(), B: torch.eye(2).double()})
    right = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    theta = State.of({A: right @ reference[A], B: reference[B] @ right.T})
    found = turned(theta, reference, by_a=True, share=0.5)
    half = 0.5**0.5 * torch.tensor([[1.0, -1.0], [1.0, 1.0]]).double()
    torch.testing.assert_close(found[A], half)
    torch.testing.assert_close(turned(theta, reference, by_a=True, share=0.0).row, theta.row)


def test_fedrot_without_rotation_is_fedit(tmp_path):
    still, fedit = go("fedrot-lora", tmp_path / "a", settings={"rotation": 0.0}), go("fedit", tmp_path / "b")
    torch.testing.assert_close(still.state.row, fedit.state.row)
    moved = go("fedrot-lora", tmp_path / "c")
    assert not torch.allclose(moved.state.row, fedit.state.row)
    assert FedRotLoRA().rotation == 1.0


@pytest.mark.parametrize(("rank", "sides"), [(3, (7, 5)), (4, (3, 9)), (4, (9, 3))])
def test_fedsvd_turns_a_and_changes_no_product(rank, sides):
    state = adapter(0, rank, sides)
    found = orthogonal(state)
    torch.testing.assert_close(product(found), product(state))
    kept = min(rank, *sides)
    eye = torch.zeros(rank, rank, dtype=torch.float64)
    eye[range(kept), range(kept)] = 1
    torch.testing.assert_close(found[A] @ found[A].T, eye)
    gram = found[B].T @ found[B]
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()))
    values = torch.linalg.svdvals(product(state))[:kept]
    torch.testing.assert_close(gram.diagonal()[:kept].sqrt(), values)
    assert found.layout == state.layout


def test_fedsvd_steps_as_ffa_before_it_turns():
    """B + (1 * 2 + 3 * 6) / 4 = B + 5 beside the old A; a late answer does not count; and nothing learned, no turn."""
    state, ones = adapter(0), torch.ones(7, 3, dtype=torch.float64)
    uploads = [
        Upload("a", 1, 0, State.of({B: 2 * ones})), Upload("b", 3, 0, State.of({B: 6 * ones})),
        Upload("c", 9, 1, State.of({B: 100 * ones})),
    ]  # fmt: skip
    after = serve(FedSVD(), state, uploads)
    torch.testing.assert_close(product(after), (state[B] + 5 * ones) @ state[A])
    untouched = serve(FedSVD(period=2), state, uploads, round=1)
    assert torch.equal(untouched[A], state[A]) and torch.equal(untouched[B], state[B] + 5 * ones)
    turned_later = serve(FedSVD(period=2), state, uploads, round=2)
    assert not torch.equal(turned_later[A], state[A])
    fresh = State.of({A: state[A], B: torch.zeros_like(state[B])})
    assert serve(FedSVD(), fresh, []).equal(fresh)


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean", "krum", "geometric-median", "centered-clipping"])
@pytest.mark.parametrize("name", ["rolora", "fedsvd"])
def test_a_liar_moves_the_mean_alone(name, rule):
    """One of seven answers is a million times as large."""
    method, server, model = methods.build({"name": name}), toy.server(), adapter(0)
    server.step = ServerStepConfig(rule, 0.2)  # type: ignore[arg-type]
    server.begin(1, 0.1)
    answers = [adapter(seed).pick([B]) * (1e6 if seed == 7 else 1.0) for seed in range(1, 8)]
    uploads = [Upload(f"c{n}", 3, 0, answer) for n, answer in enumerate(answers)]
    state = {"model": model, "turn": "lora_B"} if name == "rolora" else model
    after = asyncio.run(method.server_update(server, state, uploads))
    after = after["model"] if name == "rolora" else after
    largest = float((product(after) - product(model)).abs().max())
    assert largest > 1e4 if rule == "mean" else 0 < largest < 100
