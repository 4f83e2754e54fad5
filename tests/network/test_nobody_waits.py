"""No node holds the others up: one that lacks its client, answers no greeting, or withholds what it has announced."""

import threading
import time

import pytest
from network import NETWORK, NetworkInProcess, federate, lines, only, tree
from small_run import CLIENTS

from llm_fed.basics.errors import RunError, UserError
from llm_fed.network import roster, server
from llm_fed.network.node_folders import personal_folder

flower = pytest.importorskip("llm_fed.network.flower", reason="needs flwr")
pytestmark = pytest.mark.usefixtures("quick")
SOON = {**NETWORK, "wait": 0.2}


def lacking(link: NetworkInProcess, rounds: int):
    """Spoils greetings: bob's node says that it has nobody, until so many orders to train ada were seen."""
    trained = []

    def spoil(order, reply):
        if order["kind"] == "train" and order["client"] == "ada":
            trained.append(order["round"])
        if order["kind"] == "hello" and "bob" in reply.content.get("clients", {}) and len(trained) < rounds:
            return type(reply)({**reply.content, "clients": {}})
        return reply

    return spoil


def test_a_run_begins_without_a_client_which_joins_when_it_comes(small, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(roster, "_AGAIN", 0.0)
    link = NetworkInProcess(tmp_path, small, tree(small, rounds=4, eval={"every": 0}, network=SOON))
    link._spoil = lacking(link, 2)
    server.train(link.config, tmp_path / "run", link)
    assert (
        "2 of 3 clients have come in 0.2 s (network.wait); going on without the others: bob" in capfd.readouterr().err
    )
    who = [{line["client"] for line in lines(tmp_path, "client") if line["round"] == round} for round in range(1, 5)]
    assert who[0] == {"ada", "cyd"} and who[3] == set(CLIENTS)


def test_with_nobody_a_run_ends(small, tmp_path):
    link = NetworkInProcess(tmp_path, small, tree(small, network=SOON))
    link.online = set()
    with pytest.raises(RunError, match=r"no client has come in 0.2 s \(network.wait\): ada, bob, cyd; see"):
        server.train(link.config, tmp_path / "run", link)


@pytest.mark.parametrize(("pause", "error"), [("_UNHEARD", ""), ("_AGAIN", "out of memory")], ids=["lost", "fails"])
def test_a_node_whose_greeting_comes_to_nothing_is_greeted_again(small, tmp_path, monkeypatch, pause, error):
    monkeypatch.setattr(roster, pause, 0.05)
    spoilt = []

    def spoil(order, reply):
        if order["kind"] == "hello" and "bob" in reply.content["clients"] and not spoilt:
            spoilt.append(order)
            return type(reply)({"error": error}) if error else None
        return reply

    federate(tmp_path, small, tree(small, rounds=1, eval={"every": 0}, network={**NETWORK, "wait": None}), spoil=spoil)
    assert spoilt and {line["client"] for line in lines(tmp_path, "client")} == set(CLIENTS)


def test_what_hangs_holds_up_nothing_else(monkeypatch):
    monkeypatch.setattr(flower, "PATIENCE", 0.3)
    released = threading.Event()

    def pull(id):
        if id.startswith("hangs"):
            released.wait(30)
        return None if id == "nothing" else id.upper()

    looked, began = flower.Pulls(pull), time.monotonic()
    ids = ["hangs 1", "hangs 2", "hangs 3", "a", "nothing", "b"]
    found: dict[str, str] = {}
    while len(found) < 2 and time.monotonic() - began < 20:
        found |= looked.look([id for id in ids if id not in found])
    assert found == {"a": "A", "b": "B"}
    released.set()
    while len(found) < 5 and time.monotonic() - began < 20:
        found |= looked.look([id for id in ids if id not in found])
    assert found == {id: id.upper() for id in ids if id != "nothing"}


def test_of_many_nodes_few_are_looked_up_at_once(monkeypatch):
    monkeypatch.setattr(flower, "_SIDE_BY_SIDE", 4)
    ids, at_once, before = [str(number) for number in range(30)], [], threading.active_count()

    def pull(id):
        time.sleep(0.01)
        at_once.append(threading.active_count() - before)
        return id

    assert flower.Pulls(pull).look(ids) == dict(zip(ids, ids, strict=True)) and max(at_once) <= 4


def test_what_ends_a_look_is_raised_where_it_is_asked_for():
    def pull(id):
        raise OSError("the SuperLink is gone")

    with pytest.raises(OSError, match="SuperLink is gone"):
        flower.Pulls(pull).look(["a"])


def test_the_end_waits_for_one_silent_node_no_longer_than_a_round_does(small, tmp_path):
    silent = only("bob", "finish", lambda reply: None)
    network = {**NETWORK, "deadline": 1.0, "patience": 3600.0}
    began = time.monotonic()
    _, done = federate(tmp_path, small, tree(small, rounds=1, eval={"every": 0}, network=network), spoil=silent)
    assert done["unfinished"] == ["bob"] and time.monotonic() - began < 600
    assert [line["reason"][:17] for line in lines(tmp_path, "event")] == ["no reply in 1 s; "]


def test_runs_of_one_name_have_folders_of_their_own_at_a_node(tmp_path):
    home = tmp_path / "home"
    first = personal_folder(home, "run", "a" * 16)
    second = personal_folder(home, "run", "b" * 16)
    assert (first.name, second.name) == ("run", "run-bbbbbbbb")
    assert personal_folder(home, "run", "a" * 16) == first and personal_folder(home, "run", "b" * 16) == second
    (home / "adapters/older/ada").mkdir(parents=True)  # of a version that left no mark
    assert personal_folder(home, "older", "a" * 16).name == "older-aaaaaaaa"
    with pytest.raises(UserError, match="are another run's"):
        personal_folder(home, "run", "b" * 8 + "c" * 8)
    with pytest.raises(UserError, match="cannot name a folder"):
        personal_folder(home, "../run", "a" * 16)


def test_two_federations_of_one_name_keep_their_models_apart(small, tmp_path):
    settings = tree(small, rounds=1, eval={"every": 0})
    federate(tmp_path, small, settings)
    kept = (tmp_path / "home-ada/adapters/run/ada/adapter_model.safetensors").read_bytes()
    link = NetworkInProcess(tmp_path, small, settings | {"seed": 1})
    server.train(link.config, tmp_path / "elsewhere/run", link)
    folders = sorted(path.name for path in (tmp_path / "home-ada/adapters").iterdir())
    assert len(folders) == 2 and folders[0] == "run" and folders[1].startswith("run-")
    assert (tmp_path / "home-ada/adapters/run/ada/adapter_model.safetensors").read_bytes() == kept
