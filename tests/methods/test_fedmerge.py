"""FedMerge: each formula against numbers derived by hand, and the special cases that must equal other methods."""

import asyncio
import math

import numpy as np
import pytest
import torch
import toy

from llm_fed.basics.errors import UserError
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, federate
from llm_fed.method import Upload
from llm_fed.method.server import Server
from llm_fed.methods.fedmerge import (
    FedMerge,
    coordinates,
    draw_soup,
    logit_gradient,
    move_soup,
    new_soup,
    sizes_of,
    softmax_row,
    soup_mixing,
    step_soup,
)
from llm_fed.runs.folder import Run
from llm_fed.settings.config import LocalConfig, ServerStepConfig
from llm_fed.state import Layout, State, stack
from llm_fed.state.wire import pack, unpack

TARGETS = {"c0": 1.0, "c1": 2.0, "c2": 4.0, "c3": -3.0}
ALL = [slice(0, 2)]


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def pair(a: float, b: float) -> State:
    """P = 2: one entry per layer, so that `last-layers` of two layers sees the second number alone."""
    return State.of({"layers.0.lora_A": tensor(a), "layers.1.lora_A": tensor(b)})


def step(method: FedMerge, soup, uploads, logits=None):
    state = {"soup": soup, "logits": logits or {}}
    return asyncio.run(method.server_update(toy.server(), state, uploads))


def test_merge_is_the_softmax_weighted_sum():
    """softmax(0, ln 3) = (1/4, 3/4): (1, 2) / 4 + 3 (5, 10) / 4 = (4, 8)."""
    state = {"soup": [pair(1, 2), pair(5, 10)], "logits": {"a": torch.tensor([0, math.log(3)], dtype=torch.float64)}}
    assert FedMerge(num_models=2).broadcast(state, "a").row.tolist() == pytest.approx([4, 8])
    assert FedMerge(num_models=2).broadcast(state, "new").row.tolist() == pytest.approx([3, 6])


def test_logit_gradient_by_hand_and_against_autograd():
    """w = (1/4, 3/4), Theta = (1,0), (0,1), theta = (1/4, 3/4), Delta = (2, 1):
    <Theta_1 - theta, Delta> = 3/4 * 2 - 3/4 = 3/4, <Theta_2 - theta, Delta> = -1/4 * 2 + 1/4 = -1/4;
    g = (3/16, -3/16)."""
    weights = tensor([0.25, 0.75])
    got = logit_gradient(torch.eye(2, dtype=torch.float64), tensor([2, 1]), weights, ALL)
    assert got.tolist() == [[pytest.approx(3 / 16), pytest.approx(-3 / 16)]]

    generator = torch.Generator().manual_seed(0)
    soup, deltas, logits = (
        torch.randn(n, p, generator=generator, dtype=torch.float64) for n, p in ((3, 7), (5, 7), (5, 3))
    )
    logits.requires_grad_()
    merged = logits.softmax(1) @ soup
    (
        merged * deltas
    ).sum().backward()  # the direction Delta_i is minus the gradient at theta_i, so this ascends as Eq. 11 does
    assert torch.allclose(
        logit_gradient(soup, deltas, logits.softmax(1).detach(), [slice(0, 7)]), logits.grad, atol=1e-12
    )


@pytest.mark.parametrize(("step", "deltas", "second"), [("normalized", 7, 8), ("gradient", 8, 2)])
def test_soup_steps(step, deltas, second):
    """n = (1, 3), w = ((1/2, 1/2), (1, 0)). Normalized, model 1 moves by (1/2 Delta_1 + 3 Delta_2) / 3.5, model 2 by
    Delta_1; by Eq. 8 with n_i / n = 1/4, 3/4 model 1 by 1/8 Delta_1 + 3/4 Delta_2, model 2 by 1/8 Delta_1."""
    mixing = soup_mixing(tensor([0.5, 0.5], [1, 0]), torch.tensor([1.0, 3.0], dtype=torch.float64), step)
    moved = step_soup(tensor([0, 0], [1, 1]), tensor([deltas, 0], [0, deltas]), mixing)
    assert moved.tolist() == [[pytest.approx(1), pytest.approx(6)], [pytest.approx(second), pytest.approx(1)]]


def test_the_soup_moves_by_robust_means():
    """Columns (1/2, 1/4, 1/4) and (0, 1/2, 1/2) of weights, 1, 2 and 2 examples, at most 0.4 of them from anybody: so
    shares 0.2, 0.4, 0.4, and of model 1 (1/10, 1/10, 1/10) and of model 2 (0, 1/5, 1/5).
    Normalised, model 1 moves by the median of all three updates, model 2 by that of the last two, which is their mean.
    As Eq. 8 is written by 0.3 and 0.4 times these."""
    server = Server("server", toy.STRUCTURE, LocalConfig(), 0, lambda draws: None, step=ServerStepConfig("median", 0.4))  # type: ignore[arg-type, return-value]
    soup = [State.of({"a": torch.tensor([0.0, 0.0])}), State.of({"a": torch.tensor([1.0, 1.0])})]
    deltas = [[1.0, 9.0], [2.0, 8.0], [6.0, 1.0]]
    uploads = [Upload(f"c{i}", n, 0, State.of({"a": torch.tensor(deltas[i])})) for i, n in enumerate([1, 2, 2])]
    weights = tensor([0.5, 0.0], [0.25, 0.5], [0.25, 0.5]).double()
    sizes = sizes_of(server, uploads)
    assert sizes.tolist() == pytest.approx([0.2, 0.4, 0.4])
    for how, factors in (("normalized", (1.0, 1.0)), ("gradient", (0.3, 0.4))):
        moved = move_soup(server, soup, uploads, tensor(*deltas).float(), soup_mixing(weights, sizes, how))
        assert moved[0].row.tolist() == pytest.approx([2 * factors[0], 8 * factors[0]])
        assert moved[1].row.tolist() == pytest.approx([1 + 4 * factors[1], 1 + 4.5 * factors[1]])


def test_running_statistics_under_a_robust_rule():
    """The model's own mean is 20; three clients that weigh it alike found 14, 28 and a lie: their median is 28."""
    server = Server("server", toy.STRUCTURE, LocalConfig(), 0, lambda draws: None, step=ServerStepConfig("median", 0.4))  # type: ignore[arg-type, return-value]

    def state(mean: float) -> State:
        return State.of({"a": torch.zeros(2)}, {"mean": torch.tensor([float(mean)]), "count": torch.tensor(3)})

    uploads = [Upload(f"c{i}", 1, 0, state(mean)) for i, mean in enumerate([14, 28, 1e9])]
    moved = move_soup(
        server, [state(20)], uploads, torch.zeros(3, 2), soup_mixing(tensor([1], [1], [1]), torch.ones(3), "normalized")
    )
    assert moved[0].extras["mean"].item() == pytest.approx(28) and moved[0].extras["count"] == 3


def test_running_statistics_are_mixed_by_convex_weights():
    """c = ((1, 1/2), (0, 1/2)): model 1 takes over what client 1 found, 14; model 2 the mean of 14 and 28. Had both
    moved by differences to the merged model's, 15, model 2 would be at 20 + (14 - 15)/2 + (28 - 15)/2 = 26; and of
    variances 0.1 and 9.9 the first would be below zero after one client that found 4."""

    def state(row: list[float], mean: float) -> State:
        values, extras = torch.tensor(row, dtype=torch.float32), {"mean": torch.tensor([float(mean)])}
        return State.of({"a": values}, {**extras, "count": torch.tensor(3)})

    soup, deltas = [state([0, 0], 10), state([1, 1], 20)], [state([1, 0], 14), state([0, 1], 28)]
    uploads = [Upload(f"c{i}", 1, 0, delta) for i, delta in enumerate(deltas)]
    moved = new_soup(soup, torch.tensor([[5.0, 5], [6, 6]]), uploads, torch.tensor([[1, 0.5], [0, 0.5]]))
    assert [model.row.tolist() for model in moved] == [[5, 5], [6, 6]]
    assert [model.extras["mean"].item() for model in moved] == [14, 21]
    assert all(model.extras["count"] == 3 for model in moved)
    unpack(pack(moved))


def test_a_soup_model_that_nobody_weighs_stays():
    moved = step_soup(
        tensor([0, 0], [1, 1]),
        tensor([8, 0]),
        soup_mixing(tensor([1, 0]), torch.tensor([2.0], dtype=torch.float64), "normalized"),
    )
    assert moved.tolist() == [[8, 0], [1, 1]]


def uploads():
    return [Upload("a", 1, 0, pair(2, 1)), Upload("b", 3, 0, pair(-1, 3))]


def test_weight_steps():
    """Even weights over Theta = (1,0), (0,1): g_a = (1/4, -1/4) from Delta (2, 1), g_b = (-1, 1) from (-1, 3).
    normalized: rows of length lr; plain: lr * n_i/n * g = lr * (1/16, 3/4 * -1); fixed-magnitude: that scaled to max
    0.01."""
    soup = [pair(1, 0), pair(0, 1)]
    settings = {"num_models": 2, "inner_product": "all"}
    got = step(FedMerge(weight_lr=0.1, **settings), soup, uploads())["logits"]
    half = 0.1 / math.sqrt(2)
    assert got["a"].tolist() == pytest.approx([half, -half]) and got["b"].tolist() == pytest.approx([-half, half])
    got = step(FedMerge(weight_step="plain", weight_lr=0.1, **settings), soup, uploads())["logits"]
    assert got["a"].tolist() == pytest.approx([0.1 / 16, -0.1 / 16]) and got["b"].tolist() == pytest.approx(
        [-0.075, 0.075]
    )
    got = step(FedMerge(weight_step="fixed-magnitude", **settings), soup, uploads())["logits"]
    assert got["b"].tolist() == pytest.approx([-0.01, 0.01]) and got["a"].tolist() == pytest.approx(
        [0.01 / 12, -0.01 / 12]
    )


def test_last_layers_see_the_last_entries_alone():
    """Only the second coordinate: <Theta_j - theta, Delta> = (-1/2, 1/2) * 1 for a; a's step turns round."""
    got = step(FedMerge(num_models=2, weight_lr=0.1), [pair(1, 0), pair(0, 1)], uploads())["logits"]
    assert got["a"][0] < 0 < got["a"][1]
    layout = Layout(tuple(f"model.layers.{i}.q.lora_{x}" for i in range(12) for x in "AB"), ((1,),) * 24)
    assert coordinates(layout, "last-layers") == [slice(i, i + 1) for i in range(18, 24)]  # a quarter of 12 layers
    assert coordinates(layout, "head") == [slice(22, 23), slice(23, 24)]
    with pytest.raises(UserError, match="no entry has a layer number"):
        coordinates(Layout(("head.lora_A",), ((1,),)), "last-layers")


@pytest.mark.parametrize("order", ["together", "algorithm1", "published"])
def test_orders(order):
    """`together` uses the old weights and soup for both; `algorithm1` takes g with the new soup; `published` moves the
    soup with the new weights. One client, Delta = (2, 1), even weights, plain steps of 1, gradient soup step:
    new soup without new weights: (1,0) + (2,1)/2 = (2, 1/2) and (0,1) + (2,1)/2 = (1, 3/2);
    g with the old soup (1/4, -1/4); with the new one: differences of models are the same, so g is the same too."""
    method = FedMerge(
        num_models=2, weight_step="plain", weight_lr=1.0, soup_step="gradient", inner_product="all", order=order
    )
    got = step(method, [pair(1, 0), pair(0, 1)], uploads()[:1])
    assert got["logits"]["a"].tolist() == pytest.approx([0.25, -0.25])
    if order == "published":
        w = math.exp(0.25) / (math.exp(0.25) + math.exp(-0.25))
        assert got["soup"][0].row.tolist() == pytest.approx([1 + 2 * w, w])
    else:
        assert got["soup"][0].row.tolist() == pytest.approx([2, 0.5]) and got["soup"][1].row.tolist() == pytest.approx(
            [1, 1.5]
        )


def test_algorithm1_differs_once_clients_pull_models_apart():
    """Two clients with unlike weights move the models differently, so the new soup gives another g."""
    logits = {"a": torch.tensor([1.0, 0.0], dtype=torch.float64), "b": torch.tensor([0.0, 1.0], dtype=torch.float64)}
    settings = {"num_models": 2, "weight_step": "plain", "weight_lr": 1.0, "inner_product": "all"}
    results = {
        o: step(FedMerge(order=o, **settings), [pair(1, 0), pair(0, 1)], uploads(), logits)
        for o in ("together", "algorithm1")
    }
    assert not torch.allclose(results["together"]["logits"]["a"], results["algorithm1"]["logits"]["a"])
    assert results["together"]["soup"][0].equal(results["algorithm1"]["soup"][0])


def test_soup_inits():
    server = toy.server()
    independent, scaled, shared = (draw_soup(server, 4, how, 0.5) for how in ("independent", "scaled", "shared"))
    assert not independent[0].equal(independent[1])
    assert torch.equal(stack(scaled), 2 * stack(independent))  # sqrt(4)
    assert shared[0].equal(server.initial()) and torch.allclose(
        (shared[2] - shared[0]).row, 0.5 * server.initial("soup", 2).row
    )
    for how in ("independent", "scaled", "shared"):
        assert draw_soup(server, 1, how, 0.5)[0].equal(server.initial())


def run(folder, method, names, rounds=3, sizes=None, participation=1.0):
    clients = {name: site for name, site in toy.clients(4, sizes=sizes).items() if name in names}
    runtime = toy.ToyRuntime(TARGETS)
    with Run(folder, toy.config(rounds=rounds)) as run:
        run.begin()
        schedule = toy.Delayed(tuple(clients), participation)
        return federate(Federation(method, LocalClients(clients, schedule, runtime), toy.server(), runtime), run)


def test_weights_specialise_and_clients_that_are_not_asked_keep_theirs(tmp_path):
    """c2 and c3 want opposite models: after 20 rounds their heaviest models differ."""
    progress = run(tmp_path / "a", FedMerge(num_models=2, weight_lr=0.5), ["c2", "c3"], rounds=20, sizes=[1, 1, 1, 1])
    assert softmax_row(progress.state, "c2").argmax() != softmax_row(progress.state, "c3").argmax()
    partial = run(tmp_path / "b", FedMerge(num_models=2), list(TARGETS), rounds=1, participation=0.5)
    assert len(partial.state["logits"]) == 2
    assert FedMerge(num_models=2).report(partial.state)["weights"]["clients"] == sorted(partial.state["logits"])


def test_the_published_server():
    """Ten rounds of the server of the published code, written down in numpy: the weights first, on the old soup and by
    the head alone, along the gradient over its L1 norm in inner steps until a logit has moved by 0.01 or more; then the
    soup, by columns of the new weights. With its last overshoot granted (`max_step`) ours does the same."""
    d, m, inner_step = 3, 5, 0.004
    rng = np.random.default_rng(0)
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4), "head.bias": (2,)}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    head = slice(int(ends[1]), int(ends[-1]))
    sizes = np.array([1, 7, 2, 4, 30])
    soup, logits = rng.normal(size=(d, ends[-1])), np.zeros((m, d))

    def state(row: np.ndarray) -> State:
        parts = np.split(row, ends[:-1])
        return State.of(
            {name: torch.tensor(part.reshape(shapes[name])) for name, part in zip(shapes, parts, strict=True)}
        )

    ours = {"soup": [state(row) for row in soup], "logits": {}}
    for _ in range(10):
        deltas = rng.normal(size=(m, ends[-1]))
        exp = np.exp(logits)
        weights = exp / exp.sum(1, keepdims=True)
        gradient = np.zeros((m, d))
        for i in range(m):
            merged = weights[i] @ soup
            for j in range(d):
                inner = (soup[j] - merged)[head] @ deltas[i][head]
                gradient[i, j] = sizes[i] / sizes.sum() * weights[i, j] * inner
        gradient, before = gradient / np.abs(gradient).sum(), logits
        while np.abs(logits - before).max() < 0.01:
            logits = logits + inner_step * gradient
        exp = np.exp(logits)
        mixing = sizes[:, None] * exp / exp.sum(1, keepdims=True)
        soup = soup + (mixing / mixing.sum(0)).T @ deltas

        reached = float(np.abs(logits - before).max())
        assert 0.01 <= reached < 0.01 + inner_step
        method = FedMerge(
            num_models=d, order="published", inner_product="head", weight_step="fixed-magnitude", max_step=reached
        )
        ours = step(method, ours["soup"], [Upload(f"c{i}", int(sizes[i]), 0, state(deltas[i])) for i in range(m)],
                    ours["logits"])  # fmt: skip
        for i in range(m):
            np.testing.assert_allclose(ours["logits"][f"c{i}"], logits[i], rtol=0, atol=1e-13)
        np.testing.assert_allclose(stack(ours["soup"]), soup, rtol=0, atol=1e-13)
