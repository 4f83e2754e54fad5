"""What a server may name on a node: built-in methods and tasks, and of others only what the node's operator allows."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import outside
import pytest
import yaml
from network import HELLO, NetworkInProcess, federate, tree, work
from small_run import CLIENTS

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import Secret
from llm_fed.network import worker
from llm_fed.network.clients import RemoteClients
from llm_fed.network.node import Node, NodeSettings
from llm_fed.network.server import train
from llm_fed.settings.configfile import as_dict, from_dict
from llm_fed.state.wire import pack

EVIL = "evil:Method"


@pytest.fixture
def evil(here) -> Path:
    """A module whose import writes a file; the file's path."""
    outside.module(here, "evil", f"open({str(here / 'written')!r}, 'w').close()\n{outside.HALF}\nMethod = Half\n")
    return here / "written"


def ask(place: NodeSettings, small: Any, order: dict[str, Any], message: bytes = b"", **changes: Any) -> dict[str, Any]:
    return Node().answer(place, yaml.safe_dump(as_dict(from_dict(small.tree(**changes)))), order, message)[0]


def test_a_name_from_outside_is_refused_before_anything_is_imported(small, evil, capsys):
    """Wherever the server may write it: as the method, as a task, as a run that is merged."""
    place = NodeSettings(evil.parent / "home", str(small.data), tuple(CLIENTS))
    merged = {"kind": "finish", "run": "r", "client": "ada", "after": 0, "name": "n", "given": {EVIL: {}}}
    given = pack({"message": None, "given": {EVIL: None}})
    tried: list[tuple[dict[str, Any], bytes, dict[str, Any]]] = [
        (HELLO, b"", {"method": {"name": EVIL}}),
        (work({**merged, "kind": "train", "round": 1, "lr": 0.1, "kept": []}), b"", {"method": {"name": EVIL}}),
        (HELLO, b"", {"task": {"name": EVIL}}),
    ]
    for order, message, changes in tried:
        reply = ask(place, small, order, message, **changes)
        said = capsys.readouterr().out  # the worker's log
        assert reply["code"] == "code" and EVIL not in reply["error"]
        assert f"name={EVIL!r} is not built into llm_fed" in said, said
        assert "this machine's operator has not allowed (allowed: nothing)" in said
        assert f'add allow="{EVIL}" to --node-config' in said
    for order, message in (({**HELLO, "need": EVIL}, b""), (work(merged, content=given), given)):
        for name in ("fedit", "potara"):
            reply = ask(place, small, order, message, method={"name": name})
            assert reply["code"] == "failed" and f"{name} merges no run of {EVIL!r}" in capsys.readouterr().out
    assert not evil.exists() and "evil" not in sys.modules


def test_with_the_operators_leave_it_runs_and_without_it_no_longer(small, evil, capsys):
    """What was built while it was allowed is not used afterwards."""
    node, text = Node(), yaml.safe_dump(as_dict(from_dict(small.tree(method={"name": "evil:Half"}))))
    allowed = NodeSettings(evil.parent / "home", str(small.data), tuple(CLIENTS), allow=("evil:Half",))
    assert node.answer(allowed, text, HELLO, b"")[0]["clients"] == {"ada": 6, "bob": 6, "cyd": 6}
    assert evil.exists()
    refused = replace(allowed, allow=("evil:Other",))
    assert node.answer(refused, text, HELLO, b"")[0]["code"] == "code"
    assert "(allowed: evil:Other)" in capsys.readouterr().out


def test_the_server_says_which_node_refuses(small, evil):
    link = NetworkInProcess(evil.parent, small, tree(small, method={"name": EVIL}))
    said: list[str] = []
    RemoteClients(link, link.config, "token", Secret.fresh(), said.append).roster.greet()
    assert len(said) == 3 and all("cannot take part: the node's operator has not allowed code" in text for text in said)
    assert not evil.exists()


def test_a_whole_federation_of_a_method_that_all_nodes_allow(small, here):
    outside.module(here, "half", outside.HALF)
    settings = tree(small, rounds=1, method={"name": "half:Half", "part": 1.0})
    link = NetworkInProcess(here, small, settings)
    link.places = {id: replace(place, allow=("half:Half",)) for id, place in link.places.items()}
    scores = train(link.config, here / "run", link)["scores"]
    _, plain = federate(here / "plain", small, tree(small, rounds=1))
    assert scores["clients"].keys() == plain["scores"]["clients"].keys()
    assert scores["loss"] == pytest.approx(plain["scores"]["loss"])


def test_the_operator_says_it_in_node_config(small, evil):
    """The place travels to the worker with each order, beside what the server sends."""
    flower = pytest.importorskip("llm_fed.network.flower")

    class Context:
        node_config = {"home": str(evil.parent / "home"), "path": str(small.data), "clients": "ada,bob,cyd"}
        node_config |= {"allow": "next, evil:Method"}

    place = flower._place(Context())
    assert place["allow"] == ["next", EVIL]
    config = yaml.safe_dump(as_dict(from_dict(small.tree(method={"name": EVIL}))))
    reply, _ = worker._answer(Node(), {"place": place, "config": config, "order": {**HELLO, "allow": []}}, b"")
    assert [*reply["clients"]] == ["ada", "bob", "cyd"] and evil.exists()
    with pytest.raises(UserError, match="--node-config has 'alow'; known: home, path, clients, device, idle, .*policy"):
        Context.node_config = {"home": "h", "alow": "x"}
        flower._place(Context())
