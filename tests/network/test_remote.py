"""Clients on other machines: equal to one process, and what happens when replies are lost, late, spoilt or old."""

import json
import shutil
from dataclasses import replace
from typing import Any

import every
import pytest
import yaml
from network import HELLO, NETWORK, NetworkInProcess, adapters, assert_same_models, federate, lines, only, tree, work
from small_run import CLIENTS

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.rng import Secret
from llm_fed.experiment import run as experiment
from llm_fed.network import clients, server
from llm_fed.network.link import Reply
from llm_fed.runs.reading import finished
from llm_fed.settings.config import PartitionConfig
from llm_fed.settings.configfile import as_dict, from_dict

METHODS = [
    "fedit", "fedmerge", "fedmerge-fixed", "fedsa", "feddpa", "fedalt", "pfedmoe", "fedem", "ifca", "fedlora", "local",
    "potara", "mean", "grid",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("method", every.quick(METHODS, ["fedlora", "fedmerge", "potara"]))
def test_the_numbers_are_those_of_one_process(small, tmp_path, method):
    """Scores, losses and bytes to the digit, personal models to 1e-5; the server's folder holds no personal model.
    Which answers stand in training rows is known where the rows are, and the server has none."""
    settings = tree(small, rounds=2, method={"name": method}, eval={"base": False})
    here = experiment.train(from_dict(settings), tmp_path / "run-here" / "run")
    _, there = federate(tmp_path / "there", small, settings)
    assert here["rule"].pop("look-up") and there["rule"] == here["rule"] and "base" not in there
    assert there["round"] == here["round"] and there["scores"].keys() == here["scores"].keys()
    for key in here["scores"].keys() - {"loss", "losses"}:
        assert there["scores"][key] == here["scores"][key]
    before = [line for line in lines(tmp_path / "run-here", "client", "score", "rule", "merge")]
    after = [line for line in lines(tmp_path / "there", "client", "score", "rule", "merge")]
    assert len(before) == len(after) and len(after) >= len(CLIENTS)
    for one, other in zip(before, after, strict=True):
        assert one.keys() - {"look-up"} == other.keys()
        if one["kind"] == "score":  # a client's loss is measured beside others here, and alone there
            assert set(one["losses"]) == set(CLIENTS) and one["losses"] == pytest.approx(other["losses"], rel=1e-4)
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        for key in one.keys() - {"loss", "losses", "look-up"}:
            computed = isinstance(one[key], float) or one["kind"] == "merge" and isinstance(one[key], dict)
            assert one[key] == (pytest.approx(other[key], rel=1e-4) if computed else other[key])
    assert not (tmp_path / "there/run/adapters").exists()
    assert_same_models(tmp_path / "run-here/run", tmp_path / "there")


def test_of_a_rule_its_name_and_score_travel_alone_and_with_privacy_nothing(small, tmp_path):
    """A client's own rule is made and scored at its node."""
    network, done = federate(tmp_path / "there", small, tree(small, rounds=1))
    assert done["rule"]["rules"] == dict.fromkeys(CLIENTS, "most frequent answer")
    assert "unscored" not in done["scores"] and not lines(tmp_path / "there", "event")  # nothing is amiss
    private = tree(small, rounds=1, privacy={"clip": 1.0, "noise": 1.0, "where": "client"})
    _, hidden = federate(tmp_path / "hidden", small, private)
    assert "rule" not in hidden and not lines(tmp_path / "hidden", "rule")


def test_a_robust_mean_too(small, tmp_path):
    settings = tree(small, rounds=1, server={"aggregation": "geometric-median", "liars": 0.4})
    here = experiment.train(from_dict(settings), tmp_path / "run-here" / "run")
    plain = experiment.train(from_dict(tree(small, rounds=1)), tmp_path / "run-plain" / "run")
    assert here["scores"]["losses"] != plain["scores"]["losses"]
    federate(tmp_path / "there", small, settings)
    assert_same_models(tmp_path / "run-here/run", tmp_path / "there")
    too_few = tree(small, server={"aggregation": "krum"})
    with pytest.raises(UserError, match="needs at least 7 uploads for a mean, and there are 3, at most"):
        federate(tmp_path / "few", small, too_few)
    with pytest.raises(UserError, match="needs at least 7 uploads"):
        experiment.train(from_dict(too_few), tmp_path / "few-here")


OTHERS = ("ffa", "fedasync", "fedbuff", "ca2fl", "feddle", "fed+ft", "hfcl", "feddf", "center", "fisher-merging")


@pytest.mark.parametrize("method", every.quick(OTHERS, ["feddf", "center"]))
def test_the_other_methods_too_and_a_server_with_data_of_its_own(small, tmp_path, method):
    """In one process the server takes its examples out of the clients' test splits, so those are not compared."""
    own = {"server": {"examples": 2}} if method in ("feddle", "fed+ft", "hfcl", "feddf", "center") else {}
    settings = tree(small, rounds=2, method={"name": method}, task=own)
    experiment.train(from_dict(settings), tmp_path / "run-here" / "run")
    link = NetworkInProcess(tmp_path / "there", small, settings)
    task = replace(link.config.task, path=str(small.data))  # where the server's examples lie
    server.train(replace(link.config, task=task), tmp_path / "there/run", link)
    before, after = lines(tmp_path / "run-here", "client"), lines(tmp_path / "there", "client")
    assert [(line["client"], line["bytes_up"]) for line in before] == [(o["client"], o["bytes_up"]) for o in after]
    assert_same_models(tmp_path / "run-here/run", tmp_path / "there")


def test_a_control_that_gathers_rows_is_refused(small, tmp_path):
    settings = tree(small, method={"name": "pooled"})
    link = NetworkInProcess(tmp_path, small, settings)
    with pytest.raises(UserError, match="gathers the rows of all clients in one place, which a network is there to"):
        server.train(link.config, tmp_path / "run", link)


def test_an_old_answer_sent_again_is_refused(small, tmp_path):
    first: list[Reply] = []

    def replay(order, reply):
        if order["kind"] == "train" and order["client"] == "bob":
            first.append(reply)
            return first[0]
        return reply

    federate(tmp_path, small, tree(small, rounds=2, eval={"every": 0}), spoil=replay)
    refused = [line for line in lines(tmp_path, "event") if line["event"] == "refused upload"]
    assert [line["round"] for line in refused] == [2] and "another order" in refused[0]["reason"]


def test_memories_that_no_checkpoint_refers_to_are_deleted(small, tmp_path):
    settings = tree(small, rounds=3, method={"name": "local"}, checkpoint={"keep": 1}, eval={"every": 0})
    federate(tmp_path, small, settings)
    rounds = sorted(path.name for path in (tmp_path / "home-ada/runs").glob("*/ada/round-*"))
    assert rounds == ["round-0002", "round-0003"]


def test_a_client_whose_memory_is_gone_says_so_and_begins_again(small, tmp_path):
    def forget(order, reply):
        if order["kind"] == "evaluate" and order["client"] == "cyd" and order["after"] == 1:
            shutil.rmtree(tmp_path / "home-bob/runs", ignore_errors=True)
            link.workers[2] = type(link.workers[2])()
        return reply

    link = NetworkInProcess(tmp_path, small, tree(small, rounds=4, method={"name": "fedalt"}), forget)
    server.train(link.config, tmp_path / "run", link)
    reasons = [line["reason"] for line in lines(tmp_path, "event") if line["client"] == "bob"]
    assert len(reasons) == 1 and "the client's memory of that round is gone, so it begins again" in reasons[0]
    afters = [order["after"] for order in link.orders if order["kind"] == "train" and order["client"] == "bob"]
    assert afters == [0, 1, 0, 3]


def test_nodes_with_another_base_and_clients_at_two_nodes_are_refused(small, tmp_path, capfd):
    def other(order, reply):
        return Reply({**reply.content, "base": "another"}) if order["kind"] == "hello" and order["id"] == "2" else reply

    settings = tree(small, rounds=1, network={**NETWORK, "clients": 2})
    federate(tmp_path / "one", small, settings, spoil=other)
    assert "its base model is not the server's" in capfd.readouterr().err
    assert {line["client"] for line in lines(tmp_path / "one", "client")} == {"ada", "cyd"}
    link = NetworkInProcess(tmp_path / "two", small, settings)
    link.places[2] = replace(link.places[1], home=tmp_path / "two/another")
    server.train(link.config, tmp_path / "two/run", link)
    said = capfd.readouterr().err
    assert "node 2, registered as 'bob', says that it has ada, which network.clients does not place there" in said
    assert not (tmp_path / "two/another").exists()
    known = json.loads((tmp_path / "two/run/network.json").read_text())
    assert known["clients"] == ["ada", "cyd"] and known["nodes"] == {"ada": 1, "cyd": 3}
    # A name alone is not enough: a restarted server does not believe it either, though ada's own node is away.
    link.online, link.names[2], said = {2}, "ada", []

    def say(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            raise TimeoutError

    again = clients.RemoteClients(link, link.config, known["token"], Secret.fresh(), say)
    base = link.workers[1].answer(link.places[1], yaml.safe_dump(as_dict(link.config)), HELLO, b"")[0]["base"]
    with pytest.raises(TimeoutError):
        again.gather(base, known)
    assert "node 2 says that it has client ada" in said[0] and said[1].startswith("0 of 2 clients are connected")


def test_what_a_node_says_is_believed_only_where_it_can_be():
    for score in (None, "97", float("nan"), -101, 101, [3], {"a": 1}):  # a correlation may be below 0
        assert Reply({"score": score}).score is None
    assert Reply({"score": 50}).score == 50.0 and Reply({"score": 50, "error": "x"}).score is None
    for loss in (None, "1", float("nan"), float("inf"), -1, [3], 10**400):
        assert Reply({"loss": loss}).loss is None
    assert Reply({"loss": 2}).loss == 2.0 and Reply({"loss": 2, "error": "x"}).loss is None
    for given in (5, ["a"], {"a": 0}, {"a": True}, {"a": 10**400}, {"a": "3"}, {"": 3}, {"a\ud800": 3}, {"a\n": 3}):
        assert Reply({"clients": given}).clients == {}
    assert Reply({"clients": {"a": 3, "b": -1}}).clients == {"a": 3}
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for recipe in ("kind", None, {"a": float("nan")}, {"a": "x" * 10**6}, {"a": deep}):
        with pytest.raises(ValueError, match="its recipe is malformed"):
            Reply({"recipe": recipe}).recipe()
    assert Reply({"recipe": {"note": "a\x1b[31m\nb\ud800"}}).recipe() == {"note": "a?[31m b?"}
    assert Reply({"error": {"a": 1}}).error == Reply({"error": deep}).error == "what it says as error is no text"
    assert Reply({"error": "no\x1b[2J\r\nway\ud800" + "!" * 1000}).error == "no?[2J way?" + "!" * 289


def test_losses_that_cannot_be_believed_are_absent_and_with_privacy_none_is_told(small, tmp_path):
    """Bob's losses are no numbers, so that no mean is known; under privacy no client tells its loss at all."""

    def spoil(order, reply):
        mine = order["kind"] in ("evaluate", "finish") and order["client"] == "bob"
        return Reply({**reply.content, "loss": -float("inf")}, reply.answer) if mine else reply

    federate(tmp_path / "spoilt", small, tree(small, rounds=1), spoil=spoil)
    for line in lines(tmp_path / "spoilt", "score"):
        assert line["loss"] is None and line["losses"]["bob"] is None
        assert line["losses"]["ada"] > 0 and set(line["losses"]) == set(CLIENTS)
    link, _ = federate(tmp_path / "private", small, tree(small, rounds=1, privacy={"clip": 1.0, "noise": 0.1}))
    scores = lines(tmp_path / "private", "score")
    assert len(scores) == 2 and all(line["losses"] == {} and line["loss"] is None for line in scores)


def test_nothing_of_a_place_follows_the_server(small, tmp_path):
    """Names that would leave a client's folder are refused there."""
    link = NetworkInProcess(tmp_path, small, tree(small))
    order = {"kind": "train", "run": "../../evil", "client": "ada", "round": 1, "lr": 0.1, "after": 0, "kept": []}
    reply, _ = link.workers[1].answer(link.places[1], link._text, work(order), b"")
    assert reply["replies"][0]["code"] == "failed" and not (tmp_path / "evil").exists()


def test_what_a_federation_of_pictures_must_say(small, tmp_path):
    """The server sees no picture, and no machine sees all: classes and size come from the configuration."""
    link = NetworkInProcess(tmp_path, small, tree(small))
    for changes, said in (
        ({"name": "images"}, "task.labels must name them"),
        ({"name": "cifar10"}, "set task.image_size"),
        ({"name": "images", "labels": ("a", "b")}, "set task.image_size"),
        (
            {"name": "cifar10", "image_size": 8, "partition": PartitionConfig(kind="iid", clients=3)},
            "task.partition.kind=iid divides data among clients, and over a network",
        ),
    ):
        with pytest.raises(UserError, match=said):
            server.train(replace(link.config, task=replace(link.config.task, **changes)), tmp_path / "run", link)


def test_a_federation_whose_clients_all_fail_at_the_end_is_not_complete(small, tmp_path):
    fail = only(None, "finish", lambda reply: Reply({"error": "full"}))
    settings = tree(small, rounds=1)
    link = NetworkInProcess(tmp_path, small, settings, fail)
    with pytest.raises(RunError, match="no client finished"):
        server.train(link.config, tmp_path / "run", link)
    assert not (tmp_path / "run/summary.json").exists()
    _, done = federate(tmp_path, small, settings)
    assert done["scores"]["clients"] and finished(tmp_path / "run") == done


def test_late_answers_and_small_messages_together(small, tmp_path):
    """The form in which numbers travel is that of one process, to the byte."""
    settings = tree(small, rounds=2, method={"name": "fedmerge"}, transport="float16")
    here = experiment.train(from_dict(settings), tmp_path / "run-here" / "run")
    _, there = federate(tmp_path / "there", small, settings)
    assert there["scores"] == here["scores"]
    sizes = [
        [(line["bytes_up"], line["bytes_down"]) for line in lines(tmp_path / run, "client")]
        for run in ("run-here", "there")
    ]
    assert sizes[0] == sizes[1] and len(sizes[0]) == 6


@pytest.mark.parametrize("where", ["server", "client"])
def test_privacy_over_a_network(small, tmp_path, where):
    """The accountant's line, no number of examples, no loss; noise and sampling from seeds that are not the run's."""
    pytest.importorskip("dp_accounting")
    privacy = {"clip": 0.5, "noise": 1.0, "where": where}
    asked = 0.7 if where == "server" else 1.0
    settings = tree(small, participation=asked, privacy=privacy, rounds=2, eval={"every": 0})
    link, _ = federate(tmp_path, small, settings)
    found = lines(tmp_path, "privacy")
    assert [line["round"] for line in found] == [1, 2] and found[0]["epsilon"] < found[-1]["epsilon"]
    card = (tmp_path / "home-ada/adapters/run/ada/README.md").read_text()
    assert "Client-level (epsilon, delta)-differential privacy by the Gaussian mechanism: epsilon = " in card
    assert json.loads((tmp_path / "run/summary.json").read_text())["privacy"]["epsilon"] == found[-1]["epsilon"]
    told = lines(tmp_path, "client")
    assert told and all(line["examples"] == 1 and "loss" not in line for line in told)
    again, _ = federate(tmp_path / "again", small, settings)
    orders = [[(o["round"], o["client"]) for o in net.orders if o["kind"] == "train"] for net in (link, again)]
    if where == "client":
        assert orders[0] == orders[1]
    mine, theirs = (adapters(folder / "home-ada/adapters/run/ada") for folder in (tmp_path, tmp_path / "again"))
    assert not all(mine[file][name].equal(theirs[file][name]) for file in mine for name in mine[file])


def test_a_client_that_was_away_at_the_end_gets_its_model_later(small, tmp_path):
    fail = only("bob", "finish", lambda reply: None)
    settings = tree(small, rounds=1)
    _, first = federate(tmp_path, small, settings, spoil=fail)
    assert first["unfinished"] == ["bob"] and set(first["scores"]["clients"]) == {"ada", "cyd"}
    events = [line for line in lines(tmp_path, "event") if line["event"] == "not finished"]
    assert [line["client"] for line in events] == ["bob"] and "give the same command again" in events[0]["reason"]
    link, second = federate(tmp_path, small, settings)
    assert "unfinished" not in second and set(second["scores"]["clients"]) == set(CLIENTS)
    assert not [order for order in link.orders if order["kind"] == "train"]
    assert (tmp_path / "home-bob/adapters/run/bob/adapter_model.safetensors").exists()
    link, third = federate(tmp_path, small, settings)
    assert third == second and not link.orders


def test_a_node_that_comes_late_or_comes_back_is_greeted_again(small, tmp_path):
    """Cyd's node appears in round 2; bob's goes after it and comes back in round 4 with another worker."""
    settings = tree(small, rounds=5, eval={"every": 0}, network={**NETWORK, "clients": 2})
    link = NetworkInProcess(tmp_path, small, settings)
    link.online = {1, 2}

    def by_round(order, reply):
        if order["kind"] == "train" and order["client"] == "ada":
            link.online = {1: {1, 2, 3}, 2: {1, 3}, 3: {1, 2, 3}}.get(order["round"], link.online)
        return reply

    link._spoil = by_round
    server.train(link.config, tmp_path / "run", link)
    asked = {
        round: [o["client"] for o in link.orders if o["kind"] == "train" and o["round"] == round]
        for round in range(1, 6)
    }
    assert asked == {1: ["ada", "bob"], 2: ["ada", "bob"], 3: ["ada"], 4: ["ada", "bob"], 5: ["ada", "bob"]}
    assert [order["kind"] for order in link.orders].count("hello") == 4
