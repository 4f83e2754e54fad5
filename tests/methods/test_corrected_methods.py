"""FedProx and SCAFFOLD against their papers' formulas, on adapters of a language model and on whole image models.

The reference asks for plain gradients of batches, and takes every step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import tiny_images
import torch

from llm_fed import methods
from llm_fed.config import EvalConfig, LocalConfig
from llm_fed.engine.drive import drive
from llm_fed.engine.images import VisionEngine
from llm_fed.engine.language import LanguageEngine
from llm_fed.errors import UserError
from llm_fed.messages.wire import pack, unpack
from llm_fed.method import Method, Upload
from llm_fed.methods.fedprox import FedProx
from llm_fed.methods.scaffold import Scaffold
from llm_fed.models.lora import draw
from llm_fed.models.structure import Full
from llm_fed.site import Data, Site
from llm_fed.state import State
from llm_fed.testing import federation as battery
from llm_fed.testing import tiny

SIZES = {"a": 5, "b": 3, "c": 8}
LOCAL = LocalConfig(steps=3, batch_size=2, lr=0.1, lr_end=0.1, optimizer="sgd")


@dataclass
class Federation:
    """Three clients, a server and the engine that trains them."""

    clients: dict[str, Site]
    server: Site
    engine: Any

    def run(self, method: Method, rounds: int, asked: Callable[[int], list[str]] = lambda round: list(SIZES)) -> Any:
        """The server's state after so many rounds."""
        state = method.init(self.server)
        for round in range(1, rounds + 1):
            work = {}
            for id in asked(round):
                self.clients[id].begin(round, LOCAL.lr)
                work[id] = method.client_update(self.clients[id], unpack(pack(method.broadcast(state, id))))
            answers = drive(work, self.engine.execute)
            uploads = [Upload(id, SIZES[id], 0, answer) for id, answer in answers.items()]
            self.server.begin(round, LOCAL.lr)
            (state,) = drive(
                {"server": method.server_update(self.server, state, uploads)}, self.engine.execute
            ).values()
        return state

    def descend(self, id: str, round: int, start: State, change: Callable[[State, State], State]) -> State:
        """The client's steps of a round: theta minus lr times what `change` makes of the gradient and theta."""
        site, theta = self.clients[id], start
        site.begin(round, LOCAL.lr)
        for places in site.places(len(site.train)):
            batch = [site.train[place] for place in places]
            (found,) = drive({id: site.gradient(theta, batch)}, self.engine.execute).values()
            theta = theta - LOCAL.lr * change(found[1], theta)
        return theta


def of_text() -> Federation:
    base, structure = battery.language_base(), battery.STRUCTURE

    def site(id: str, train: Any, local: LocalConfig = LOCAL) -> Site:
        return Site(id, structure, local, 0, lambda g: draw(base.model, structure, g, dtype=torch.float64), Data(train))

    clients = {id: site(id, tiny.answers(k, size)) for k, (id, size) in enumerate(SIZES.items())}
    return Federation(clients, site("server", ()), LanguageEngine(base, EvalConfig()))


def of_pictures() -> Federation:
    base = tiny_images.cnn()
    party = partial(tiny_images.party, base, structure=Full(), local=LOCAL)
    clients = {id: party(tiny.pictures_of(k, size), id) for k, (id, size) in enumerate(SIZES.items())}
    return Federation(clients, party([], "server"), VisionEngine(base))


@pytest.fixture(params=[of_text, of_pictures], ids=["adapters", "whole models"])
def federation(request: pytest.FixtureRequest) -> Federation:
    made = request.param()
    made.server.clients = tuple(SIZES)
    return made


def assert_close(found: State, expected: State, start: State) -> None:
    assert (expected.row - start.row).abs().max() > 1e-3  # it was trained
    torch.testing.assert_close(found.row, expected.row, rtol=0, atol=1e-10)


def test_fedprox_by_hand(federation):
    """theta <- theta - lr (g + mu (theta - x)); the server's mean is weighted by numbers of examples."""
    mu, x, total = 3.0, federation.server.initial(), sum(SIZES.values())
    for round in (1, 2):
        trained = {id: federation.descend(id, round, x, lambda g, theta, x=x: g + mu * (theta - x)) for id in SIZES}
        x = sum((size / total * trained[id] for id, size in SIZES.items()), 0 * x)
    start = federation.server.initial()
    assert_close(federation.run(FedProx(mu=mu), 2), x, start)
    plain = federation.run(methods.build({"name": "fedavg"}), 2)
    assert (plain - start).norm() > 1.1 * (x - start).norm()  # it is held back


def test_scaffold_by_hand(federation):
    """y <- y - lr (g + c - c_i); c_i+ is the mean of the client's gradients; x and c move by means over those asked,
    c by their share of all clients. Of three clients two take part in each round."""
    x = federation.server.initial()
    c, own, asked = 0 * x, dict.fromkeys(SIZES, 0 * x), {1: ["a", "b"], 2: ["b", "c"], 3: ["a", "c"]}
    for round, names in asked.items():
        models, controls = [], []
        for id in names:
            gradients: list[State] = []
            y = federation.descend(
                id, round, x, lambda g, theta, id=id, seen=gradients, c=c: seen.append(g) or g + c - own[id]
            )
            mean = sum(gradients, 0 * x) * (1 / len(gradients))
            models.append(y - x)
            controls.append(mean - own[id])
            own[id] = mean
        x = x + sum(models, 0 * x) * (0.5 / len(names))
        c = c + sum(controls, 0 * x) * (1 / len(SIZES))
    state = federation.run(Scaffold(server_lr=0.5), 3, asked.__getitem__)
    assert_close(state["model"], x, federation.server.initial())
    torch.testing.assert_close(state["control"].row, c.row, rtol=0, atol=1e-10)
    assert c.norm() > 1e-3 and federation.clients["a"].memory["control"].norm() > 1e-3


def test_with_one_client_scaffold_is_fedavg(federation):
    """Then c is its own control variate, and the correction is zero."""
    federation.server.clients = ("a",)
    alone: Mapping[str, Any] = {"asked": lambda round: ["a"]}
    found = federation.run(Scaffold(), 2, **alone)["model"]
    federation.clients["a"].memory.clear()
    assert_close(found, federation.run(methods.build({"name": "fedavg"}), 2, **alone), federation.server.initial())


@pytest.mark.parametrize(
    "method, changes, said",
    [
        (Scaffold(), {"optimizer": "adamw"}, "scaffold reads mean gradients .* set local.optimizer=sgd"),
        (Scaffold(), {"momentum": 0.9}, "local.momentum=0"),
        (Scaffold(), {"lr_end": 0.0}, "local.lr_end above 0"),
        (FedProx(), {"proximal": 0.1}, "of strength method.mu; leave local.proximal out"),
    ],
)
def test_settings_that_do_not_go_with_them(method, changes, said):
    server = of_pictures().server
    server.local = replace(LOCAL, **changes)
    with pytest.raises(UserError, match=said):
        method.init(server)


def test_an_engine_says_what_it_cannot_do():
    """In the place of a bare KeyError, or of a loss that is silently another."""
    pictures, text = of_pictures(), of_text()
    site, start = pictures.clients["a"], pictures.clients["a"].initial()
    with pytest.raises(UserError, match="asks for Generate, which whole image models cannot give .they give Answers"):
        drive({"a": site.generate(start, [[1]])}, pictures.engine.execute)
    site, start = text.clients["a"], text.clients["a"].initial()
    with pytest.raises(UserError, match="a function for whole image models alone"):
        drive({"a": site.fit(start, loss=lambda answer, labels, places: 0)}, text.engine.execute)


def test_fedprox_needs_a_strength():
    with pytest.raises(UserError, match="method.mu is 0.0; it must be above 0"):
        methods.build({"name": "fedprox", "mu": 0})
