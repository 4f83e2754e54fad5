"""CFL and FL+HC: clusters by hand, and what they are where they find none."""

import asyncio
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import toy

from llm_fed.merge.linkage import agglomerated, cosines
from llm_fed.method import Method, State, Upload
from llm_fed.methods.cfl import CFL
from llm_fed.methods.fl_hc import FLHC
from llm_fed.state.wire import pack, unpack

LINE = torch.tensor([0.0, 1.0, 2.5, 10.0, 11.0, 20.0])
APART = (LINE[:, None] - LINE).abs()


@pytest.mark.parametrize(
    "linkage, most, expected",
    [
        # Nearest rows: 1, 1, 1.5, 7.5, 9. Furthest: {0,1} and 2.5 are 2.5 apart, {10,11} and 20 ten. Mean of pairs: 2.
        ("single", 1.4, [[0, 1], [2], [3, 4], [5]]),
        ("single", 8.0, [[0, 1, 2, 3, 4], [5]]),
        ("complete", 2.4, [[0, 1], [2], [3, 4], [5]]),
        ("complete", 9.9, [[0, 1, 2], [3, 4], [5]]),
        ("average", 2.1, [[0, 1, 2], [3, 4], [5]]),
        ("average", 9.4, [[0, 1, 2, 3, 4], [5]]),
    ],
)
def test_clusters_of_a_line_by_hand(linkage, most, expected):
    assert agglomerated(APART, linkage, most=most) == expected


@pytest.mark.parametrize("linkage", ["single", "complete", "average"])
def test_clusters_are_scipys(linkage):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy", reason="scipy is not installed")
    for seed in range(20):
        rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        labels = hierarchy.fcluster(hierarchy.linkage(rows.numpy(), linkage), 1.5, "distance")
        found = agglomerated(torch.cdist(rows, rows), linkage, most=1.5)
        theirs = {label: sorted(k for k in range(12) if labels[k] == label) for label in set(labels)}
        assert sorted(theirs.values()) == found


def test_single_linkage_is_the_bipartition_of_the_least_cross_similarity():
    """Eq. 27 of CFL by trying all bipartitions of seven clients."""
    for seed in range(20):
        alike = cosines(torch.randn(7, 4, generator=torch.Generator().manual_seed(seed)))
        halves = agglomerated(-alike, "single", clusters=2)
        found = float(alike[halves[0]][:, halves[1]].max())
        tried = []
        for mask in range(1, 2**6):
            one = [k for k in range(7) if mask >> k & 1]
            other = [k for k in range(7) if not mask >> k & 1]
            tried.append(float(alike[one][:, other].max()))
        assert found == pytest.approx(min(tried))


def run(method: Method, rounds: list[dict[str, list[float]]], clients: str = "abcd") -> dict:
    """The server's state after rounds in which these clients sent these updates, from zero."""
    server = replace(toy.server(), clients=list(clients))
    start = State.of({"w": torch.zeros(2, dtype=torch.float64)})
    with patch.object(server, "initial", lambda: start):
        state = method.init(server)
    for number, sent in enumerate(rounds, 1):
        server.round = number
        uploads = [Upload(name, 1, 0, State.of({"w": torch.tensor(row).double()})) for name, row in sent.items()]
        state = asyncio.run(method.server_update(server, state, uploads))
    return state


def model(method: Method, state: dict, client: str) -> list[float]:
    return method.broadcast(state, client).row.tolist()


TOGETHER = dict.fromkeys("abcd", [1.0, 1.0])
OPPOSITE = {"a": [1.0, 0.1], "b": [1.0, -0.1], "c": [-1.0, 0.1], "d": [-1.0, -0.1]}  # the mean is zero


def test_cfl_parts_where_the_mean_stands_still_and_clients_pull():
    method = CFL(stationary=0.1, incongruent=4.0)
    state = run(method, [TOGETHER, OPPOSITE])
    assert state["groups"] == [["a", "b"], ["c", "d"]]
    assert model(method, state, "a") == [2.0, 1.0] and model(method, state, "d") == [0.0, 1.0]
    assert model(method, state, "new") == [2.0, 1.0] and method.report(state) == {"groups": state["groups"]}
    assert [one.row.tolist() for one in method.pool(state)] == [[2.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    "changed, sent",
    [
        ({"stationary": 1e-9}, {**OPPOSITE, "a": [1.1, 0.1]}),  # the mean still moves
        ({"incongruent": 100.0}, OPPOSITE),  # nobody pulls hard enough
        ({}, {"a": [1.0, 0.1], "c": [-1.0, -0.1]}),  # two did not answer, and the mean of the others is zero
    ],
)
def test_cfl_is_fedavg_where_it_does_not_part(changed, sent):
    method = CFL(**{"stationary": 0.1, "incongruent": 4.0, **changed})
    state = run(method, [TOGETHER, sent])
    assert state["groups"] == [["a", "b", "c", "d"]]
    mean = torch.tensor(list(sent.values())).double().mean(0) + 1
    torch.testing.assert_close(state["models"][0].row, mean)


def test_cfl_parts_again_and_a_single_client_does_not():
    method = CFL(stationary=0.5, incongruent=0.5)
    state = run(method, [TOGETHER, OPPOSITE, {"a": [0.0, 1.0], "b": [0.0, -1.0], "c": [0.0, 1.0], "d": [0.0, 1.0]}])
    assert state["groups"] == [["a"], ["b"], ["c", "d"]]
    assert run(method, [TOGETHER, {"a": [0.0, 0.0]}], clients="a")["groups"] == [["a"]]


def test_fl_hc_clusters_once():
    method = FLHC(rounds_before=2, threshold=0.5)
    state = run(method, [TOGETHER, OPPOSITE])
    assert state["groups"] == [["a", "b"], ["c", "d"]] and state["last"] is None
    assert model(method, state, "b") == [2.0, 1.0] and model(method, state, "c") == [0.0, 1.0]
    later = {"a": [1.0, 0.0], "b": [-1.0, 0.0], "c": [1.0, 0.0]}
    state = run(method, [TOGETHER, OPPOSITE, later])
    assert state["groups"] == [["a", "b"], ["c", "d"]]
    assert model(method, state, "a") == [2.0, 1.0] and model(method, state, "d") == [1.0, 1.0]
    assert method.report(state) == {"groups": state["groups"], "clustered": True}


def test_fl_hc_waits_for_every_client_and_takes_its_last_update():
    method = FLHC(rounds_before=1, threshold=0.5)
    first = {name: OPPOSITE[name] for name in "abc"}
    assert run(method, [first])["groups"] == [["a", "b", "c", "d"]]
    state = run(method, [first, {"a": [-1.0, 0.0], "d": OPPOSITE["d"]}])
    assert state["groups"] == [["a", "c", "d"], ["b"]]


def test_fl_hc_keeps_and_sends_the_common_model_of_clusters_of_which_nobody_answers():
    """The clustering waited for the first client alone, so three clusters of one client have no answer in its round."""
    method = FLHC(rounds_before=1, threshold=0.001)
    state = run(method, [{name: OPPOSITE[name] for name in "bcd"}, {"a": [1.0, 0.1]}])
    assert state["groups"] == [["a"], ["b"], ["c"], ["d"]]
    kept = unpack(pack(state))
    assert model(method, kept, "b") == model(method, kept, "c") == model(method, state, "d")
    assert model(method, kept, "a") != model(method, kept, "b")


@pytest.mark.parametrize("distance, threshold", [("euclidean", 0.5), ("manhattan", 0.5), ("cosine", 0.1)])
def test_fl_hc_by_each_distance(distance, threshold):
    method = FLHC(rounds_before=1, threshold=threshold, distance=distance, linkage="complete")
    assert run(method, [OPPOSITE])["groups"] == [["a", "b"], ["c", "d"]]
    assert len(run(FLHC(rounds_before=1, threshold=10.0, distance=distance), [OPPOSITE])["groups"]) == 1
