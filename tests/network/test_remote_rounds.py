"""When a round over a network ends, who is asked in it, and in which round an answer counts."""

from pathlib import Path

import pytest
import yaml
from network import HELLO, NETWORK, NetworkInProcess, federate, lines, only, tree
from small_run import CLIENTS

from llm_fed.basics.rng import Secret
from llm_fed.methods.fedit import FedIT
from llm_fed.network import server
from llm_fed.network.clients import RemoteClients
from llm_fed.runs.records import timed_rounds
from llm_fed.settings.configfile import as_dict, from_dict

pytestmark = pytest.mark.usefixtures("quick")


def seconds(folder: Path) -> float:
    """What the only round of a run took."""
    (round,) = timed_rounds(folder / "run")
    return round["seconds"]


def test_a_round_ends_at_its_deadline_and_says_who_is_missing(small, tmp_path):
    lost = only("bob", "train", lambda reply: None)
    federate(tmp_path, small, tree(small, rounds=2, eval={"every": 0}), spoil=lost)
    late = [(line["round"], line["client"]) for line in lines(tmp_path, "event") if line["event"] == "late"]
    assert (1, "bob") in late and {client for _, client in late} == {"bob"}
    rounds = lines(tmp_path, "round")
    assert [line["arrived"] for line in rounds] == [2, 2] and rounds[0]["late"] == 1
    assert {line["client"] for line in lines(tmp_path, "client")} == {"ada", "cyd"}


@pytest.mark.parametrize(
    "changes",
    [
        {"network": {**NETWORK, "deadline": 0.2, "patience": 0.2}},
        {"network": {**NETWORK, "deadline": 0.2, "patience": 600.0}, "privacy": {"clip": 0.5, "noise": 1.0}},
    ],
    ids=["patience", "a sample of one round"],
)
def test_who_is_given_up_is_asked_again(small, tmp_path, changes):
    if "privacy" in changes:
        pytest.importorskip("dp_accounting")
    lost = only("bob", "train", lambda reply: None)
    federate(tmp_path, small, tree(small, rounds=2, eval={"every": 0}, **changes), spoil=lost)
    assert [(line["asked"], line["late"]) for line in lines(tmp_path, "round")] == [(3, 1)] * 2
    events = [(line["round"], line["client"], line["event"]) for line in lines(tmp_path, "event")]
    assert events == [(round, "bob", "given up") for round in (1, 2)]


def test_a_late_answer_counts_in_the_round_that_it_reaches(small, tmp_path, monkeypatch):
    kept, seen = {}, []
    real = FedIT.server_update

    async def spy(self, site, state, uploads):
        seen.append([(upload.client, upload.staleness) for upload in uploads])
        return await real(self, site, state, uploads)

    monkeypatch.setattr(FedIT, "server_update", spy)

    def late(order, reply):
        if order.get("client") == "bob" and order["kind"] == "train" and order["round"] == 1:
            kept[order["id"]] = reply
            return None
        if order["kind"] == "train" and order["round"] == 2 and order["client"] == "cyd":
            for id, first in kept.items():
                link.deliver(id, first)
        return reply

    settings = tree(small, eval={"every": 0}, network={**NETWORK, "patience": 600.0})
    link = NetworkInProcess(tmp_path, small, settings, late)
    server.train(link.config, tmp_path / "run", link)
    bobs = [(line["round"], line["staleness"]) for line in lines(tmp_path, "client") if line["client"] == "bob"]
    assert bobs == [(1, 1), (3, 0)]
    assert seen[1] == [("ada", 0), ("bob", 1), ("cyd", 0)] and seen[2] == [(name, 0) for name in CLIENTS]
    assert [line["asked"] for line in lines(tmp_path, "round")] == [3, 2, 3]
    afters = [order["after"] for order in link.orders if order["kind"] == "train" and order["client"] == "bob"]
    assert afters == [0, 1]


def test_a_round_ends_with_enough_answers(small, tmp_path):
    """Long before its deadline, though bob never answers."""
    lost = only("bob", "train", lambda reply: None)
    network = {**NETWORK, "enough": 2, "deadline": 30.0, "patience": 60.0}
    federate(tmp_path, small, tree(small, eval={"every": 0}, network=network, rounds=1), spoil=lost)
    assert seconds(tmp_path) < 20 and [line["arrived"] for line in lines(tmp_path, "round")] == [2]


def test_a_round_ends_when_all_have_answered_though_they_are_not_enough(small, tmp_path):
    network = {"clients": 2, "enough": 3, "deadline": 30.0, "patience": 60.0}
    link = NetworkInProcess(tmp_path, small, tree(small, eval={"every": 0}, network=network, rounds=1))
    link.online = {1, 2}
    server.train(link.config, tmp_path / "run", link)
    assert seconds(tmp_path) < 20 and [line["arrived"] for line in lines(tmp_path, "round")] == [2]


def test_clients_cannot_know_who_is_sampled_under_central_privacy(small, tmp_path, monkeypatch):
    """The sample comes from a secret of the server's, not from the run's seed, which every node has."""
    config = from_dict(tree(small, participation=0.5, privacy={"clip": 1.0, "noise": 1.0}))
    monkeypatch.setattr(RemoteClients, "_idle", lambda self: list(self.names))
    samples = []
    for secret in (Secret.fresh(), Secret.fresh()):
        clients = RemoteClients(NetworkInProcess(tmp_path, small, tree(small)), config, "t", secret)
        clients.names = tuple(f"c{i}" for i in range(40))
        samples.append(clients._cohort(1))
    assert samples[0] != samples[1] and all(5 < len(sample) < 35 for sample in samples)


@pytest.mark.parametrize(
    ("clients", "told"), [(2, False), (["cyd", "bob", "ada"], False), (4, True), (["ada", "bob"], True)]
)
def test_a_run_goes_on_with_the_clients_that_it_began_with(small, tmp_path, clients, told):
    link, said = NetworkInProcess(tmp_path, small, tree(small, network={**NETWORK, "clients": clients})), []
    base = link.workers[1].answer(link.places[1], yaml.safe_dump(as_dict(link.config)), HELLO, b"")[0]
    remote = RemoteClients(link, link.config, "t", Secret.fresh(), said.append)
    remote.gather(base["base"], list(CLIENTS))
    assert list(remote.names) == list(CLIENTS)
    notice = (
        "this run began with ada, bob, cyd and continues with them, whatever network.clients says now; fresh=true "
        "starts again"
    )
    assert said == [notice] * told
