"""Feddle's search against autograd through all anchors, over images and over text."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import tiny_images
import torch
from server_steps import serve
from torch import Tensor, nn
from torch.func import functional_call

from llm_fed.engine.engine import Engine
from llm_fed.kinds.images import Images
from llm_fed.method.server import Server
from llm_fed.methods.feddle import Feddle
from llm_fed.models.lora import draw
from llm_fed.settings.config import EvalConfig, LocalConfig
from llm_fed.state import State
from llm_fed.testing import federation
from llm_fed.testing.tiny import answers


@dataclass(frozen=True)
class Searched:
    """One search over an atlas of three anchors of different lengths, two of them this round's."""

    server: Server
    before: Any
    after: Any
    updates: list[State]


def searched(method: Feddle, server: Server, engine: Any, scale: float = 0.05) -> Searched:
    draws = torch.Generator().manual_seed(3)

    def update(size: float) -> State:
        row = size * scale * torch.randn(model.row.shape, generator=draws, dtype=model.row.dtype)
        return State(model.layout, row, {name: 0 * value for name, value in model.extras.items()})

    server.cohort = 2
    state = method.init(server)
    model = state["model"]
    updates = [update(size) for size in (1.0, 0.3, 2.0)]
    before = serve(method, server, state, updates[0], run=engine.execute)
    return Searched(server, before, serve(method, server, before, *updates[1:], run=engine.execute), updates)


def reference(method: Feddle, run: Searched, loss_of: Any, pull: float) -> tuple[list[float], Tensor, list[float]]:
    """Eq. 10 as it stands: all anchors are in the graph. (coefficients, new model, losses)"""
    omega = run.before["model"].row
    norms = torch.stack([update.row.norm() for update in run.updates])
    normalised = [norms.median() * update.row / norm for update, norm in zip(run.updates, norms, strict=True)]
    fallback = torch.stack([torch.zeros(()), norms[1] / norms.median() / 2, norms[2] / norms.median() / 2]).to(omega)
    c = nn.Parameter(fallback.clone())
    optimizer, losses = torch.optim.Adam([c], lr=method.search_lr), []
    for batch in run.server.batches(epochs=method.search_epochs):
        optimizer.zero_grad()
        loss = loss_of(omega + sum(c[m] * anchor for m, anchor in enumerate(normalised)), batch)
        losses.append(loss.item())
        (loss + pull / 2 * (c - fallback).square().sum()).backward()
        optimizer.step()
    return c.tolist(), omega + sum(c[m] * a for m, a in enumerate(normalised)).detach(), losses


def assert_searched(method: Feddle, run: Searched, loss_of: Any, pull: float = 0.0) -> None:
    coefficients, model, losses = reference(method, run, loss_of, pull)
    found = run.after["search"]
    assert found["losses"] == pytest.approx(losses, abs=1e-10)
    assert found["coefficients"] == pytest.approx(coefficients, abs=1e-10)
    torch.testing.assert_close(run.after["model"].row, model, rtol=0, atol=1e-10)
    assert max(abs(c - f) for c, f in zip(found["coefficients"], found["fallback"], strict=True)) > method.search_lr
    assert run.after["importance"] == pytest.approx([abs(c) for c in coefficients], abs=1e-10)


def entries(state: State, row: Tensor) -> dict[str, Tensor]:
    return {name: row[state.layout.slices[name]].view(state.layout.shape_of[name]) for name in state}


def image_loss(base: Images, state: State, head: dict[str, Tensor] | None = None) -> Any:
    """Mean cross-entropy of the whole model at a row, or under another head."""
    module = copy.deepcopy(base.model).eval()

    def loss(row: Tensor, batch: Any) -> Tensor:
        inputs = base.prepare(torch.stack([picture.pixels for picture in batch]))
        values = {**entries(state, row), **(head or {}), **state.extras}
        logits = functional_call(module, values, (), {"pixel_values": inputs})
        logits = getattr(logits, "logits", logits)
        return nn.functional.cross_entropy(logits, torch.tensor([picture.label for picture in batch]))

    return loss


@pytest.mark.parametrize("make", [tiny_images.cnn, tiny_images.resnet], ids=["cnn", "resnet"])
def test_the_search_over_images_is_autograd_through_all_anchors(make):
    base = make()
    server = tiny_images.party(base, tiny_images.pictures(20), "server")
    method = Feddle(search_epochs=2, search_lr=0.01)
    run = searched(method, server, Engine(base))
    assert_searched(method, run, image_loss(base, run.before["model"]))


def test_a_search_out_of_domain_is_autograd_under_the_new_head():
    """Its body alone decides the coefficients; the model's own head moves along, and lambda is 0.01."""
    base = tiny_images.cnn()
    server = tiny_images.party(base, tiny_images.pictures(20, classes=6), "server")
    server.data = replace(server.data, num_labels=6, foreign=True)
    method = Feddle(search_epochs=2, search_lr=0.01, head_epochs=3, head_lr=0.05)
    run = searched(method, server, Engine(base))
    head = {f"head.{name}": value for name, value in run.after["head"].tensors().items()}
    assert head["head.weight"].shape == (6, 64) and head["head.weight"].abs().max() > 0.01
    assert_searched(method, run, image_loss(base, run.before["model"], head), pull=0.01)
    moved = run.after["model"]["head.weight"] - run.before["model"]["head.weight"]
    assert moved.abs().max() > 1e-3


@pytest.mark.parametrize("fallback_start", [True, False])
def test_the_new_head_is_fitted_to_the_features_at_the_start_of_the_search(fallback_start):
    """Eq. 8 by a plain loop of Adam, from the head of the round before."""
    base = tiny_images.cnn()
    server = tiny_images.party(base, tiny_images.pictures(20, classes=6), "server")
    server.data = replace(server.data, num_labels=6, foreign=True)
    method = Feddle(head_epochs=2, head_lr=0.05, fallback_start=fallback_start)
    run = searched(method, server, Engine(base))
    model = run.before["model"].row
    if fallback_start:
        model = model + sum(update.row for update in run.updates[1:]) / 2
    module = copy.deepcopy(base.model).eval()
    head = nn.Linear(64, 6).double()
    head.load_state_dict(run.before["head"].tensors())
    features: list[Tensor] = []
    module.head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].detach()))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for batch in run.server.batches(epochs=2):
        inputs = base.prepare(torch.stack([picture.pixels for picture in batch]))
        functional_call(module, entries(run.before["model"], model), (inputs,))
        optimizer.zero_grad()
        labels = torch.tensor([picture.label for picture in batch])
        nn.functional.cross_entropy(head(features[-1]), labels).backward()
        optimizer.step()
    for name, value in run.after["head"].tensors().items():
        torch.testing.assert_close(value, head.state_dict()[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("foreign", [False, True])
def test_the_search_over_text_is_autograd_through_all_anchors(foreign):
    """A language model keeps its head out of domain; only lambda differs."""
    base, structure = federation.language_base(), federation.STRUCTURE
    local = LocalConfig(batch_size=3)
    server = Server("server", structure, local, 0, lambda g: draw(base.model, structure, g, torch.float64))
    server.data = replace(server.data, train=answers(0, 7), foreign=foreign)
    method = Feddle(search_epochs=2, search_lr=0.01)
    run = searched(method, server, Engine(base, EvalConfig()), scale=0.3)
    wrapped = tiny.stock_peft(base.model, structure, run.before["model"]).eval()
    names = {name: f"base_model.model.{name}.default.weight" for name in run.before["model"]}

    def loss(row: Tensor, batch: Any) -> Tensor:
        values = {names[name]: value for name, value in entries(run.before["model"], row).items()}
        total, count = torch.zeros(()), 0
        for example in batch:
            ids, target = torch.tensor([example.input_ids]), torch.tensor(example.target)[1:]
            logits = functional_call(wrapped, values, (), {"input_ids": ids}).logits[0, :-1][target].float()
            total = total + nn.functional.cross_entropy(logits, ids[0, 1:][target], reduction="sum")
            count += int(target.sum())
        return total / count

    assert run.after["head"] is None
    coefficients, _, losses = reference(method, run, loss, 0.01 if foreign else 0.0)
    assert run.after["search"]["losses"] == pytest.approx(losses, abs=1e-6)  # logits are float32
    assert run.after["search"]["coefficients"] == pytest.approx(coefficients, abs=1e-6)


def test_an_update_in_the_wrong_direction_gets_a_negative_coefficient():
    """One client learned right labels, the other wrong ones. FedBuff would add both halves; the search subtracts the
    second and reaches a lower loss on the server's pictures."""
    base = tiny_images.cnn(torch.float32)
    engine = Engine(base)
    right = tiny_images.pictures(32, seed=1)
    wrong = [replace(picture, label=(picture.label + 1) % tiny_images.CLASSES) for picture in right]
    server = tiny_images.party(base, tiny_images.pictures(32, seed=2), "server")
    server.cohort = 2
    method = Feddle(search_epochs=10, search_lr=0.05)
    state = method.init(server)
    updates = [
        tiny_images.answer(engine, tiny_images.party(base, train).fit(state["model"], epochs=4)) - state["model"]
        for train in (right, wrong)
    ]
    after = serve(method, server, state, *updates, run=engine.execute)
    good, bad = after["search"]["coefficients"]
    assert bad < 0 < good
    buffered = serve(replace(method, search_epochs=0), server, state, *updates, run=engine.execute)
    found, fallback = tiny_images.answer(engine, server.losses_of([after["model"], buffered["model"]]))
    assert found < fallback - 0.1
