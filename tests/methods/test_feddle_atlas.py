"""Feddle by hand: FedBuff as a special case, the atlas, the start of the search and its regularisation."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import toy
from server_steps import serve

from llm_fed.basics.errors import UserError
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, federate
from llm_fed.federation.schedule import Delayed
from llm_fed.method import Upload
from llm_fed.method.server import Server
from llm_fed.method.site import Data, Site
from llm_fed.methods.fedbuff import FedBuff
from llm_fed.methods.feddle import Feddle
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.settings.config import LocalConfig
from llm_fed.state import State


def vector(*values: float) -> State:
    return State.of({"x": torch.tensor(values, dtype=torch.float64)})


def start(method: Feddle, *targets: State, at: State | None = None, cohort: int = 2) -> tuple[Site, Any]:
    """A server with these examples, and the method's state around `at`, by default the origin of the plane."""
    server = Server(
        "server", "plane", LocalConfig(batch_size=2), 0, lambda generator: at or vector(0, 0), Data(targets)
    )  # type: ignore[arg-type]
    server.cohort = cohort
    server.begin(0, 0.1)
    return server, method.init(server)


def rows(state: Any) -> list[list[float]]:
    return [anchor.row.tolist() for anchor in state["anchors"]]


# FedBuff as a special case


@dataclass(frozen=True)
class BufferOfTheRound(FedBuff):
    """FedBuff whose buffer is as large as what arrives in the round."""

    async def server_update(self, server: Server, state: Any, uploads: list[Upload]) -> Any:
        return await FedBuff.server_update(replace(self, buffer=max(1, len(uploads))), server, state, uploads)


def federation(method: Any, folder: Any, rounds: int) -> State:
    """Five clients whose answers are late."""
    clients, server = toy.clients(5), toy.server()
    server.clients, server.cohort = tuple(clients), 3
    targets = {name: 1.0 + 2 * i for i, name in enumerate(clients)}
    schedule, runtime = Delayed(tuple(clients), 0.6, 1, sigma=2.0, drop_out=0.1), toy.ToyRuntime(targets)
    with Run(folder, toy.config(rounds=rounds)) as run:
        run.begin()
        progress = federate(Federation(method, LocalClients(clients, schedule, runtime), server, runtime), run)
    return progress.state["model"]


@pytest.mark.parametrize("settings", [{}, {"normalize": False, "atlas_size": 7}, {"server_lr": 0.3}])
def test_without_a_search_it_is_fedbuff(tmp_path, settings):
    """Eight rounds of late answers, one of them without any."""
    feddle, fedbuff = Feddle(search_epochs=0, **settings), BufferOfTheRound(server_lr=settings.get("server_lr", 1.0))
    models = [federation(method, tmp_path / str(i), 8) for i, method in enumerate((feddle, fedbuff))]
    torch.testing.assert_close(models[0].row, models[1].row, rtol=0, atol=1e-12)
    assert models[0].row.abs().max() > 2
    arrived = [line["arrived"] for line in read_records(tmp_path / "0/metrics.jsonl") if line["kind"] == "round"]
    assert min(arrived) == 0 and max(arrived) >= 3


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("updates", [[(0, 0)], [(0, 0), (0, 0)], [(0, 0), (4, 0)], [(0, 0), (0, 0), (6, 0)]])
def test_an_update_of_zero_does_no_harm(epochs, updates):
    """It counts in FedBuff's mean, not in the usual norm, and its coefficient stays zero."""
    method = Feddle(search_epochs=epochs, search_lr=1e-9)
    server, state = start(method, vector(1, 1), cohort=3)
    after = serve(method, server, state, *(vector(*update) for update in updates))
    mean = sum(update[0] for update in updates) / len(updates)
    assert after["model"].row.tolist() == pytest.approx([mean, 0], abs=1e-7)
    again = serve(method, server, after)
    assert again["model"].row.tolist() == pytest.approx([mean, 0], abs=1e-7)


def test_without_arrivals_nothing_moves_before_the_first_and_the_atlas_is_searched_after_it():
    """The model is at (1, 0) after round 1, the server's example at (3, 0): one step of Adam, of 0.5, along an anchor
    of length 1."""
    method = Feddle(search_lr=0.5)
    server, state = start(method, vector(3, 0))
    state = serve(method, server, state)
    assert state["model"].row.tolist() == [0, 0] and method.report(state) == {}
    state = serve(replace(method, search_lr=1e-12), server, state, vector(1, 0))
    state = serve(method, server, state)
    assert state["model"].row.tolist() == pytest.approx([1.5, 0], abs=1e-6)
    assert method.report(state) == {"coefficients": [0.5], "fallback": [0.0], "losses": [2.0]}


# The atlas


def test_anchors_are_searched_at_their_median_length():
    """Lengths 1, 2 and 8 become 2 (Eq. 4); the fallback's coefficients 1/3 become 1/6, 1/3 and 4/3, so that the mean is
    as it was; kept are the updates themselves. Adam's first step adds 0.01 to each coefficient."""
    updates = [vector(1, 0), vector(0, 2), vector(8, 0)]
    for normalize, lengths, fallback in ((True, (2, 2, 2), (1 / 6, 1 / 3, 4 / 3)), (False, (1, 2, 8), (1 / 3,) * 3)):
        method = Feddle(normalize=normalize, search_lr=0.01)
        server, state = start(method, vector(50, 50), cohort=3)
        state = serve(method, server, state, *updates)
        assert state["search"]["fallback"] == pytest.approx(fallback, abs=1e-12)
        assert state["search"]["coefficients"] == pytest.approx([f + 0.01 for f in fallback], abs=1e-9)
        moved = [3 + 0.01 * (lengths[0] + lengths[2]), 2 / 3 + 0.01 * lengths[1]]
        assert state["model"].row.tolist() == pytest.approx(moved, abs=1e-9)
        assert rows(state) == [[1, 0], [0, 2], [8, 0]]


@pytest.mark.parametrize("importance, gone", [(True, 2), (False, 0)])
def test_the_least_important_anchor_makes_room(importance, gone):
    """Four of four are searched; the third, along which the loss is flat, has |c| = 0. Without importance the oldest
    goes. What is new stands last."""
    method = Feddle(importance=importance, search_lr=1e-3, server_lr=0.5)
    server, state = start(method, *(vector(9, 9, 0),), at=vector(0, 0, 0), cohort=2)
    state = serve(method, server, state, vector(1, 0, 0), vector(0, 1, 0))
    state = serve(method, server, state, vector(0, 0, 1), vector(1, 1, 0))
    state["importance"] = [0.3, 0.2, 0.1, 0.4]
    before = rows(state)
    state = serve(method, server, state, vector(5, 0, 0))
    assert rows(state) == [row for place, row in enumerate(before) if place != gone] + [[5, 0, 0]]
    assert len(state["importance"]) == 4 and None not in state["importance"]


def test_new_anchors_are_dropped_only_where_all_are_new():
    """An atlas of three that holds one searched anchor: the second arrival fills it, the third takes the place of the
    searched one although its |c| is the largest; the fourth that of the oldest new one."""
    method = Feddle(atlas_size=3)
    server, state = start(method, vector(50, 50))
    state = serve(method, server, state, vector(1, 0))
    state["importance"] = [1e9]
    assert rows(serve(method, server, state, *(vector(k, 0) for k in (2, 3)))) == [[1, 0], [2, 0], [3, 0]]
    assert rows(serve(method, server, state, *(vector(k, 0) for k in (2, 3, 4)))) == [[2, 0], [3, 0], [4, 0]]
    last = serve(method, server, state, *(vector(k, 0) for k in (2, 3, 4, 5)))
    assert rows(last) == [[3, 0], [4, 0], [5, 0]]
    assert len(last["importance"]) == 3


def test_an_atlas_holds_twice_the_cohort_unless_a_size_is_given():
    for settings, size in (({}, 6), ({"atlas_size": 2}, 2), ({"atlas_size": 50}, 8)):
        method = Feddle(search_epochs=0, **settings)
        server, state = start(method, cohort=3)
        assert len(serve(method, server, state, *(vector(k, 1) for k in range(8)))["anchors"]) == size


# The start of the search and its regularisation


@pytest.mark.parametrize(
    "pull, foreign, expected", [(None, False, 5), (None, True, (5 + 0.01) / 1.01), (1.0, False, 3), (1e4, True, 1)]
)
def test_the_regularisation_pulls_to_the_fallback(pull, foreign, expected):
    """(c - 5)^2 / 2 + lambda (c - 1)^2 / 2 is least at c = (5 + lambda) / (1 + lambda); the search starts at 0.
    lambda is 0 in domain and 0.01 out of it unless it is given."""
    method = Feddle(regularization=pull, fallback_start=False, search_epochs=600, search_lr=0.05)
    server, state = start(method, vector(5, 0))
    server.data = replace(server.data, foreign=foreign)
    state = serve(method, server, state, vector(1, 0))
    assert state["search"]["coefficients"] == pytest.approx([expected], abs=2e-3)


def test_running_statistics_follow_the_mean_of_the_arrivals():
    """They have no coefficient: (1 + 3) / 2 is added to 10, and nothing in a round without arrivals."""

    def with_statistics(value: float, *row: float) -> State:
        state = vector(*row)
        return State(state.layout, state.row, {"running_mean": torch.tensor([value], dtype=torch.float64)})

    method = Feddle(search_epochs=3, search_lr=0.1)
    server, state = start(method, with_statistics(0, 4, 4), at=with_statistics(10, 0, 0))
    state = serve(method, server, state, with_statistics(1, 1, 0), with_statistics(3, 0, 1))
    assert state["model"].extras["running_mean"].tolist() == [12]
    assert serve(method, server, state)["model"].extras["running_mean"].tolist() == [12]


# Mistakes


def test_a_search_needs_examples_at_the_server():
    with pytest.raises(UserError, match="the server has none; set task.server.examples, or method.search_epochs=0"):
        start(Feddle())
    start(Feddle(search_epochs=0))
