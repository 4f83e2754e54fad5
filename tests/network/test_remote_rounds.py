"""Rounds over a network: when one ends, who is asked, in which an answer counts; clients with pictures; warnings."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import every
import numpy as np
import pytest
import tiny_images
import torch
import yaml
from network import HELLO, NETWORK, NetworkInProcess, assert_same_models, federate, lines, only, tree
from PIL import Image
from small_run import CLIENTS, Small, write_data

from llm_fed.basics.rng import Secret
from llm_fed.experiment import run as experiment
from llm_fed.experiment.watching import believed
from llm_fed.methods.fedit import FedIT
from llm_fed.network import server
from llm_fed.network.clients import RemoteClients
from llm_fed.network.link import Reply, summary_of
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
    monkeypatch.setattr(RemoteClients, "_idle", lambda self, round: list(self.names))
    samples = []
    for secret in (Secret.fresh(), Secret.fresh()):
        clients = RemoteClients(NetworkInProcess(tmp_path, small, tree(small)), config, "t", secret, print)
        clients.names = tuple(f"c{i}" for i in range(40))
        samples.append(clients._cohort(1))
    assert samples[0] != samples[1] and all(5 < len(sample) < 35 for sample in samples)


def test_that_nobody_is_there_is_said_in_each_round(small, tmp_path, monkeypatch):
    link, said = NetworkInProcess(tmp_path, small, tree(small)), []
    remote = RemoteClients(link, link.config, "t", Secret.fresh(), said.append)
    remote.names, remote.roster.node = ("ada",), {"ada": 1}
    monkeypatch.setattr(remote.roster, "greet", lambda: None)
    monkeypatch.setattr("time.sleep", lambda seconds: link.online.add(1))
    for round in (1, 2):
        link.online.clear()
        assert remote._idle(round) == ["ada"] and said[-1] == f"no client is there for round {round}; waiting"


@pytest.mark.parametrize(
    ("clients", "told"), [(2, False), (["cyd", "bob", "ada"], False), (4, True), (["ada", "bob"], True)]
)
def test_a_run_goes_on_with_the_clients_that_it_began_with(small, tmp_path, clients, told):
    link, said = NetworkInProcess(tmp_path, small, tree(small, network={**NETWORK, "clients": clients})), []
    base = link.workers[1].answer(link.places[1], yaml.safe_dump(as_dict(link.config)), HELLO, b"")[0]
    remote = RemoteClients(link, link.config, "t", Secret.fresh(), said.append)
    remote.gather(base["base"], {"clients": CLIENTS, "nodes": {}, "examples": {}})
    assert list(remote.names) == list(CLIENTS)
    notice = (
        "this run began with ada, bob, cyd and continues with them, whatever network.clients says now; fresh=true "
        "starts again"
    )
    assert said == [notice] * told


# Clients with pictures, each of which has folders of its own: equal to one process


NAMES = ("ash", "beech", "cedar", "elm")  # of the classes; each client lacks one
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedmerge": {"method": {"name": "fedmerge", "num_models": 2}},
    "fedmoe": {"method": {"name": "fedmoe"}, "base": {"clients": ["cnn", "resnet-9"]}},
    "fedbn": {"method": {"name": "fedbn"}, "base": {"name": "resnet-9"}},
    "adapters": {
        "method": {"name": "fedit"},
        "adapter": {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
        "local": {"lr": 0.02, "lr_end": 0.02},
    },
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> SimpleNamespace:
    """A folder for each client, as `NetworkInProcess` divides it among its nodes, and a checkpoint."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, client in enumerate(CLIENTS):
        pixels, labels = tiny_images.arrays(24, seed=number, classes=len(NAMES), size=16)
        for k, (picture, label) in enumerate(zip(np.asarray(pixels), np.asarray(labels).tolist(), strict=True)):
            if label != number % len(NAMES):
                place = folder / "data" / client / ("test" if k % 3 == 0 else "train") / NAMES[label]
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture.squeeze()).save(place / f"{k}.png")
    tiny_images.save(tiny_images.vit(torch.float32), folder / "vit")
    return SimpleNamespace(data=folder / "data", vit=folder / "vit")


def configured(pictures: SimpleNamespace, name: str, **changes: Any) -> dict[str, Any]:
    settings = tiny_images.tree(pictures.data, rounds=2, network=NETWORK, eval={"every": 1})
    settings["task"] = {
        "name": "images", "path": str(pictures.data), "validation": 0.0, "labels": list(NAMES), "image_size": 16,
    }  # fmt: skip
    for section, values in METHODS[name].items():
        settings[section] = {**(settings.get(section) or {}), **values}
    if name == "adapters":
        settings["base"] = {"name": str(pictures.vit), "dtype": "float32"}
    return settings


@pytest.mark.parametrize("name", every.quick(METHODS, ["adapters", "fedmerge"]))
def test_the_numbers_are_those_of_one_process(pictures, tmp_path, name):
    settings = configured(pictures, name)
    here = experiment.train(from_dict(settings), tmp_path / "run-here" / "run")
    _, there = federate(tmp_path / "there", pictures, settings)
    assert there["round"] == here["round"] and there["scores"]["clients"] == here["scores"]["clients"]
    before, after = (lines(tmp_path / place, "client", "score") for place in ("run-here", "there"))
    assert len(before) == len(after) >= len(CLIENTS)
    for one, other in zip(before, after, strict=True):
        for key in one.keys() - {"losses"}:
            close = isinstance(one[key], float)
            assert one[key] == (pytest.approx(other[key], rel=1e-4) if close else other[key]), key
    assert not (tmp_path / "there/run/adapters").exists()
    assert_same_models(tmp_path / "run-here/run", tmp_path / "there")


def test_a_node_with_other_classes_says_so(pictures, tmp_path, capsys):
    """To its own operator."""
    settings = configured(pictures, "fedavg")
    settings["task"]["labels"] = ["ash", "beech", "cedar"]
    link = NetworkInProcess(tmp_path, pictures, settings)
    (id,) = link.send([(1, HELLO, b"")], 1.0)
    (reply,) = link.receive([id]).values()
    assert reply.error and "elm" not in reply.error
    assert "has the class 'elm', which task.labels does not name; add it there" in capsys.readouterr().out


# Warnings: each node looks at its own clients, and the server believes figures alone


NODES = (("ada", "bob"), ("cyd",))


@pytest.fixture
def larger(small, tmp_path):
    return Small(small.base, write_data(tmp_path / "data", {"train": 6, "validation": 2, "test": 8}), scored={})


def settings(small, **changes: Any) -> dict[str, Any]:
    network = {**NETWORK, "clients": ["ada", "bob@ada", "cyd"], "wait": 20.0, "deadline": 60.0, "patience": 60.0}
    return tree(small, rounds=1, method={"name": "fedmerge"}, network=network, **changes)


def test_scores_of_the_base_and_warnings_are_those_of_one_process(larger, tmp_path):
    _, done = federate(tmp_path / "there", larger, settings(larger), nodes=NODES)
    assert not (tmp_path / "there/run/cross.json").exists()  # no personal model travels
    experiment.train(from_dict(settings(larger)), tmp_path / "here")
    here = json.loads((tmp_path / "here/summary.json").read_text())
    assert done["base"] == here["base"] and done["base"]["losses"].keys() == CLIENTS.keys()
    assert {warned["kind"] for warned in done["warnings"]} <= {"below-rule"}  # one round teaches hardly anything
    assert "the base alone" in (tmp_path / "there/run/report.html").read_text()


def test_with_privacy_nothing_of_examples_is_said(larger, tmp_path):
    private = settings(larger, privacy={"clip": 1.0, "noise": 1.0, "where": "client"})
    private["method"] = {"name": "fedit"}
    _, done = federate(tmp_path / "there", larger, private, nodes=NODES)
    assert "base" not in done and any("privacy.clip" in text for text in done["unchecked"])
    assert not (tmp_path / "there/run/cross.json").exists()


def test_what_a_client_says_is_believed_only_where_it_can_be():
    good = {"score": 10.0, "base": 50.0, "difference": -40.0, "low": -60.0, "high": -20.0, "examples": 20}
    (warned,) = believed({"ada": {"below-base": good}}, CLIENTS)
    assert warned["clients"] == ["ada"] and warned["figures"]["ada"] == good
    bads = ({**good, "low": "x"}, {**good, "low": float("nan")}, {**good, "high": True}, {}, 5, {**good, "score": 1e9})
    for bad in bads:
        assert believed({"ada": {"below-base": bad}}, CLIENTS) == []
    assert believed({"ada": {"<script>": good}}, CLIENTS) == []
    other = {"own": 1.0, "other": 2.0, "difference": 1.0, "low": 0.5, "high": 2.0, "examples": 9, "model": "mallory"}
    for model in ("mallory", ["bob"], 5):
        assert believed({"ada": {"another-model": {**other, "model": model}}}, CLIENTS.keys()) == []
    assert believed({"ada": {"another-model": {**other, "model": "bob"}}}, CLIENTS.keys())
    assert Reply({"warnings": [1]}).warned == {}
    assert Reply({"tested": 12}).tested == 12 and Reply({"tested": -1}).tested == 0
    for bad in (5, [1], None, {"score": 101}, {"score": "1"}, {"loss": 1.0}):
        assert summary_of("rouge1", {"ada": Reply({"of_base": bad}).of_base}) is None
