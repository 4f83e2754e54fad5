"""FedProx, SCAFFOLD, FedDyn, Ditto, pFedMe and servers with an optimizer against their papers' formulas, on adapters
of a language model and on whole image models.

The reference asks for plain gradients of batches, and takes every step itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import tiny_images
import torch
import toy
from server_steps import serve

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.engine.engine import Engine
from llm_fed.method import Method, Upload
from llm_fed.method.client import Client
from llm_fed.method.server import Server
from llm_fed.method.site import Data, Site
from llm_fed.methods.ditto import Ditto
from llm_fed.methods.feddyn import FedDyn
from llm_fed.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from llm_fed.methods.fedprox import FedProx
from llm_fed.methods.pfedme import PFedMe
from llm_fed.methods.scaffold import Scaffold
from llm_fed.models.lora import draw
from llm_fed.models.structure import Full
from llm_fed.runtime.local import drive
from llm_fed.settings.config import EvalConfig, LocalConfig
from llm_fed.state import State
from llm_fed.state.wire import pack, unpack
from llm_fed.testing import federation as battery
from llm_fed.testing import tiny

SIZES = {"a": 5, "b": 3, "c": 8}
LOCAL = LocalConfig(steps=3, batch_size=2, lr=0.1, lr_end=0.1, optimizer="sgd")


@dataclass
class Federation:
    """Three clients, a server and the engine that trains them."""

    clients: dict[str, Site]
    server: Server
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
            step = {"server": method.server_update(self.server, state, uploads)}
            (state,) = drive(step, self.engine.execute).values()
        return state

    def descend(
        self,
        id: str,
        round: int,
        start: State,
        change: Callable[[State, State], State],
        *,
        nth: int = 0,
        steps: int | None = None,
    ) -> State:
        """The client's steps of its nth fit of a round: theta minus lr times what `change` makes of the gradient and
        theta."""
        site, theta = self.clients[id], start
        site.begin(round, LOCAL.lr)
        for places in site.indices(len(site.train), steps, nth):
            batch = [site.train[place] for place in places]
            (found,) = drive({id: site.gradient(theta, batch)}, self.engine.execute).values()
            theta = theta - LOCAL.lr * change(found[1], theta)
        return theta


def of_text() -> Federation:
    base, structure = battery.language_base(), battery.STRUCTURE

    def site(id: str, train: Any, local: LocalConfig = LOCAL) -> Any:
        fresh = partial(draw, base.model, structure, dtype=torch.float64)
        kind = Server if id == "server" else Client
        return kind(id, structure, local, 0, fresh, Data(train))

    clients = {id: site(id, tiny.answers(k, size)) for k, (id, size) in enumerate(SIZES.items())}
    return Federation(clients, site("server", ()), Engine(base, EvalConfig()))


def of_pictures() -> Federation:
    base = tiny_images.cnn()
    party = partial(tiny_images.party, base, structure=Full(), local=LOCAL)
    clients = {id: party(tiny.pictures_of(k, size), id) for k, (id, size) in enumerate(SIZES.items())}
    return Federation(clients, party([], "server"), Engine(base))


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


def test_running_statistics_under_scaffold_go_to_the_clients_mean():
    """From 1 to the mean of 0.1 and 0.3, and not by server_lr = 3 times the change."""

    def sent(row: float, variance: float) -> State:
        return State.of({"x": torch.tensor([row])}, {"running_var": torch.tensor([variance])})

    server, state = toy.server(), {"model": sent(0.0, 1.0), "control": number(0.0)}
    server.clients = ("a", "b")
    contents = [{"model": sent(1.0, change), "control": number(4.0)} for change in (-0.9, -0.7)]
    after = serve(Scaffold(server_lr=3.0), server, state, *contents)
    assert after["model"].extras["running_var"].item() == pytest.approx(0.2)
    assert after["model"].row.item() == 3.0 and after["control"].row.item() == 4.0


def number(value: float) -> State:
    return State.of({"x": torch.tensor([value])})


def test_feddyn_by_hand(federation):
    """theta <- theta - lr (g - g_k + alpha (theta - x)); g_k -= alpha (theta - x); h is the mean of the g_k over all
    clients, those not asked included; x is the mean of the trained models minus h / alpha."""
    alpha, x = 0.5, federation.server.initial()
    h, own, asked = 0 * x, dict.fromkeys(SIZES, 0 * x), {1: ["a", "b"], 2: ["b", "c"], 3: ["a", "c"]}
    for round, names in asked.items():
        updates = []
        for id in names:
            theta = federation.descend(
                id, round, x, lambda g, theta, x=x, before=own[id]: g - before + alpha * (theta - x)
            )
            updates.append(theta - x)
            own[id] = own[id] - alpha * (theta - x)
        h = h - alpha / len(SIZES) * sum(updates, 0 * x)
        x = x + sum(updates, 0 * x) * (1 / len(names)) - (1 / alpha) * h
        torch.testing.assert_close(h.row, sum(own.values(), 0 * x).row / len(SIZES), rtol=0, atol=1e-12)
    state = federation.run(FedDyn(alpha=alpha), 3, asked.__getitem__)
    assert_close(state["model"], x, federation.server.initial())
    torch.testing.assert_close(state["h"].row, h.row, rtol=0, atol=1e-10)
    assert h.norm() > 1e-3


def test_ditto_by_hand(federation):
    """w as in FedAvg; v <- v - lr (g + lambda (v - w)), from v of the round before, on batches of its own."""
    strength, w, total = 2.0, federation.server.initial(), sum(SIZES.values())
    own = dict.fromkeys(SIZES, w)
    for round in (1, 2):
        trained = {id: federation.descend(id, round, w, lambda g, theta: g) for id in SIZES}
        own = {
            id: federation.descend(id, round, v, lambda g, v, w=w: g + strength * (v - w), nth=1)
            for id, v in own.items()
        }
        w = sum((size / total * trained[id] for id, size in SIZES.items()), 0 * w)
    assert_close(federation.run(Ditto(strength=strength), 2), w, federation.server.initial())
    for id, site in federation.clients.items():
        assert_close(site.memory["personal"], own[id], federation.server.initial())
        assert (own[id] - w).norm() > 1e-3


def test_pfedme_by_hand(federation):
    """theta <- theta - lr (g + lambda (theta - w)) for K steps, w <- w + eta lambda (theta - w), R times; then
    w <- (1 - beta) w + beta mean."""
    method = PFedMe(strength=2.0, local_rounds=2, inner_steps=3, outer_lr=0.2, mixing=0.5)
    start = x = federation.server.initial()
    own, total = {}, sum(SIZES.values())
    for round in (1, 2):
        sent = {}
        for id in SIZES:
            w = theta = x
            for nth in range(2):
                theta = federation.descend(
                    id, round, theta, lambda g, theta, w=w: g + 2.0 * (theta - w), nth=nth, steps=3
                )
                w = w + 0.4 * (theta - w)
            sent[id], own[id] = w, theta
        mean = sum((size / total * sent[id] for id, size in SIZES.items()), 0 * x)
        x = 0.5 * x + 0.5 * mean
    assert_close(federation.run(method, 2), x, start)
    for id, site in federation.clients.items():
        assert_close(site.memory["personal"], own[id], start)
    with pytest.raises(UserError, match="method.outer_lr [*] method.strength is 3; it must be at most 1"):
        PFedMe(strength=15.0, outer_lr=0.2).init(federation.server)


@pytest.mark.parametrize(
    ("method", "v", "beta1"),
    [
        (FedAdagrad(server_lr=0.5, beta1=0.25, tau=0.1), lambda v, d: v + d**2, 0.25),
        (FedAdam(server_lr=0.5, tau=0.1), lambda v, d: 0.99 * v + 0.01 * d**2, 0.9),
        (FedYogi(server_lr=0.5, tau=0.1), lambda v, d: v - 0.01 * d**2 * torch.sign(v - d**2), 0.9),
    ],
    ids=["adagrad", "adam", "yogi"],
)
def test_server_optimizers_by_hand(federation, method, v, beta1):
    """Algorithm 2 of Reddi et al.: v begins at tau^2, m at 0; Delta is the mean update by numbers of examples."""
    start = x = federation.server.initial()
    m, second = 0 * x.row, 0 * x.row + 0.01
    for round in (1, 2, 3):
        d = mean_update(federation, round, x)
        m, second = beta1 * m + (1 - beta1) * d, v(second, d)
        x = x.like(x.row + 0.5 * m / (second.sqrt() + 0.1))
    state = federation.run(method, 3)
    assert_close(state["model"], x, start)
    torch.testing.assert_close(state["second"], second, rtol=0, atol=1e-10)
    assert (second - 0.01).abs().max() > 1e-5


def test_server_momentum_by_hand(federation):
    start = x = federation.server.initial()
    velocity = 0 * x.row
    for round in (1, 2, 3):
        velocity = 0.8 * velocity + mean_update(federation, round, x)
        x = x.like(x.row + 0.5 * velocity)
    assert_close(federation.run(FedAvgM(server_lr=0.5, beta=0.8), 3)["model"], x, start)
    federation.server.begin(1, LOCAL.lr)
    plain, none = (federation.run(m, 2) for m in (methods.build({"name": "fedavg"}), FedAvgM(beta=0.0)))
    assert torch.allclose(plain.row, none["model"].row, atol=1e-12)


def mean_update(federation: Federation, round: int, x: State) -> torch.Tensor:
    trained = {id: federation.descend(id, round, x, lambda g, theta: g) for id in SIZES}
    return sum((size / sum(SIZES.values()) * (trained[id] - x).row for id, size in SIZES.items()), 0 * x.row)


@pytest.mark.parametrize(
    "method, changes, said",
    [
        (FedDyn(), {"proximal": 0.1}, "of strength method.alpha; leave local.proximal out"),
        (Ditto(), {"proximal": 0.1}, "of strength method.strength; leave local.proximal out"),
        (PFedMe(), {"proximal": 0.1}, "of strength method.strength; leave local.proximal out"),
        (Scaffold(), {"optimizer": "adamw"}, "scaffold computes mean gradients .* set local.optimizer=sgd"),
        (Scaffold(), {"momentum": 0.9}, "local.momentum=0"),
        (Scaffold(), {"lr_end": 0.0}, "local.lr_end above 0"),
        (Scaffold(), {"decay": "cosine"}, "local.decay=constant"),
        (Scaffold(), {"warmup_steps": 1}, "local.warmup_steps=0"),
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
    with pytest.raises(
        UserError, match="needs Generate, which whole image models do not support .they support Answers"
    ):
        drive({"a": site.generate(start, [[1]])}, pictures.engine.execute)
    site, start = text.clients["a"], text.clients["a"].initial()
    with pytest.raises(UserError, match="loss=FUNCTION returned int for"):
        drive({"a": site.fit(start, loss=lambda answer, labels, places: 0)}, text.engine.execute)
