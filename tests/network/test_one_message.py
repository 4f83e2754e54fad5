"""A node with several clients: one message, one pass over the base, the numbers of one process; each fails alone."""

from pathlib import Path
from typing import Any

import every
import pytest
from network import HELLO, NETWORK, NetworkInProcess, lines, only, tree, work
from small_run import CLIENTS

from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import Secret
from llm_fed.bench import build
from llm_fed.engine import fit
from llm_fed.experiment import run as experiment
from llm_fed.methods.fedit import FedIT
from llm_fed.network import server
from llm_fed.network.clients import RemoteClients
from llm_fed.network.link import Reply
from llm_fed.network.node import Node
from llm_fed.network.refusals import fused, told
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict
from llm_fed.state.wire import pack

pytestmark = pytest.mark.usefixtures("quick")
AT_ADA = {**NETWORK, "clients": ["ada", "bob@ada", "cyd@ada"]}
SPREAD = {**NETWORK, "clients": ["ada", "bob@ada", "cyd"]}


def together(folder: Path, small: Any, settings: dict[str, Any], nodes: Any = (tuple(CLIENTS),), **options: Any) -> Any:
    link = NetworkInProcess(folder, small, settings, nodes=nodes, **options)
    server.train(link.config, folder / "run", link)
    return link


@pytest.mark.parametrize("method", every.quick(["fedit", "fedmerge", "fedalt", "potara"], ["fedit"]))
def test_one_node_with_all_clients_computes_what_one_process_does(small, tmp_path, method, monkeypatch):
    """Lines of clients and scores, and digests of what was sent, what came and the state, to the last bit. A round is
    one message and one fused pass, and so are its scores."""
    real, passes = fit.fit, []
    monkeypatch.setattr(fit, "fit", lambda adapted, requests: passes.append(len(requests)) or real(adapted, requests))
    settings = tree(small, rounds=3, method={"name": method}, network=AT_ADA)
    experiment.train(from_dict(settings), tmp_path / "run")
    before, own = passes.copy(), passes.clear()
    link = together(tmp_path / "there", small, settings)
    assert passes == before and own is None
    here, there = (lines(folder, "client", "score", "merge") for folder in (tmp_path, tmp_path / "there"))
    assert here == there and len(here) > len(CLIENTS)
    chains = [read_records(folder / "run/digests.jsonl") for folder in (tmp_path, tmp_path / "there")]
    for one, other in zip(*chains, strict=True):
        for key in one.keys() & {"kind", "round", "sent", "uploads", "state", "due"}:
            assert one[key] == other[key], key
    if method != "potara":  # which runs two others first
        # hello; training and scores of three rounds; the end
        assert [count for _, count in link.messages] == [1, 3, 3, 3, 3, 3, 3, 3]
        assert before == [3, 3, 3] or method != "fedit"


def test_who_is_not_asked_to_train_is_scored_all_the_same(small, tmp_path):
    """One of three clients trains in each round."""
    settings = tree(small, rounds=3, network=AT_ADA, participation=0.3)
    link = together(tmp_path, small, settings)
    experiment.train(from_dict(settings), tmp_path / "here" / "run")
    assert [count for _, count in link.messages] == [1, 1, 3, 1, 3, 1, 3, 3]
    assert lines(tmp_path, "client", "score") == lines(tmp_path / "here", "client", "score")
    assert [len(line["clients"]) for line in lines(tmp_path, "score")] == [3, 3, 3, 3]
    ((built, _),) = link.workers[1]._built.values()
    assert built.runtime.clients_per_pass == 3  # whom a round asks may all be at one node


FAILED = told(ValueError())["error"]


def _raises(client: str, error: Exception) -> Any:
    """A client half that fails at one client after it has trained."""
    real = FedIT.client_update

    async def update(self, site, message):
        found = await real(self, site, message)
        if site.id == client and site.round == 2:
            raise error
        return found

    return update


@pytest.mark.parametrize(
    "error",
    [ValueError("no such thing"), ClientError("its loss is nan")],
    ids=["a mistake in the method", "a loss that is not finite"],
)
def test_an_exception_of_one_client_ends_that_one_alone(small, tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr(FedIT, "client_update", _raises("bob", error))
    together(tmp_path, small, tree(small, rounds=2, eval={"every": 0}, network=AT_ADA))
    (event,) = lines(tmp_path, "event")
    assert (event["round"], event["client"], event["reason"]) == (2, "bob", FAILED)
    assert f"{type(error).__name__}: {error}" in capsys.readouterr().out  # the node's own log
    assert [line["arrived"] for line in lines(tmp_path, "round")] == [3, 2]


def test_an_error_in_a_shared_pass_is_not_the_others(small, tmp_path, monkeypatch, capfd):
    """Bob's examples break the pass; the others then train without him, with the numbers of a round in which he only
    failed."""
    real = fit.fit

    def breaks(adapted, requests):
        if any(request.site == "bob" for request in requests):
            raise RuntimeError("out of memory")
        return real(adapted, requests)

    monkeypatch.setattr(fit, "fit", breaks)
    together(tmp_path, small, tree(small, rounds=1, network=AT_ADA))
    (event,) = lines(tmp_path, "event")
    assert (event["client"], event["reason"]) == ("bob", FAILED)
    assert {line["client"] for line in lines(tmp_path, "client")} == {"ada", "cyd"}
    said = "ada, bob, cyd: RuntimeError: out of memory in a pass that they share; now one after another"
    assert said in capfd.readouterr().out


def test_a_node_answers_for_nobody_else(small, tmp_path):
    """Ada's node has bob and says more than it was asked: replies without a question reach nobody."""
    link = NetworkInProcess(tmp_path, small, tree(small, rounds=1, network=SPREAD), nodes=(("ada", "bob"), ("cyd",)))
    real = link.deliver

    def more(id: str, *replies: Reply) -> None:
        real(id, *replies, Reply({"client": "cyd", "examples": 6, "ask": "x"}, b"more"), Reply({}, b"and more"))

    link.deliver = more
    server.train(link.config, tmp_path / "run", link)
    assert [line["arrived"] for line in lines(tmp_path, "round")] == [3] and not lines(tmp_path, "event")
    plain = together(tmp_path / "plain", small, tree(small, rounds=1, network=SPREAD), nodes=(("ada", "bob"), ("cyd",)))
    assert lines(tmp_path, "client", "score") == lines(tmp_path / "plain", "client", "score")
    assert [node for node, _ in plain.messages] == [1, 2] * 4


def test_a_node_that_does_not_answer_is_late_for_all_its_clients(small, tmp_path):
    lost = only("ada", "train", lambda reply: None)
    together(tmp_path, small, tree(small, rounds=1, network=SPREAD), nodes=(("ada", "bob"), ("cyd",)), spoil=lost)
    assert [(e["client"], e["event"]) for e in lines(tmp_path, "event")] == [("ada", "late"), ("bob", "late")]
    assert [line["arrived"] for line in lines(tmp_path, "round")] == [1]


def test_nodes_and_servers_of_the_version_before_are_refused_in_plain_words(small, tmp_path):
    def old(order, reply):
        without = {key: value for key, value in reply.content.items() if key != "protocol"}
        return Reply(without) if order["kind"] == "hello" and order["id"] == "2" else reply

    link, said = NetworkInProcess(tmp_path, small, tree(small), old), []
    clients = RemoteClients(link, link.config, "t", Secret.fresh(), said.append)
    base = Reply(link.workers[1].answer(link.places[1], link._text, HELLO, b"")[0]).content["base"]
    clients.roster.base = base
    clients.roster.greet()
    assert set(clients.roster.node) == {"ada", "cyd"}
    assert said == [
        "node 2 cannot take part: it speaks version 1 of the protocol, and the server version 2; install the server's "
        "llm_fed there, and end its worker"
    ]
    reply, _ = link.workers[1].answer(link.places[1], link._text, {"kind": "hello"}, b"")
    assert reply["code"] == "protocol" and "install the same llm_fed at both" in reply["error"]


def test_an_order_for_somebody_who_is_not_there_fails_alone(small, tmp_path, capsys):
    """Beside one that names no place in the content, and one that is asked twice."""
    link = NetworkInProcess(tmp_path, small, tree(small, network=AT_ADA), nodes=(tuple(CLIENTS),))
    evaluate = {"kind": "evaluate", "run": "r", "after": 0, "split": "validation"}
    content = pack(build.prepare(from_dict(small.tree()), Reporter()).server.initial())
    asked = [{**evaluate, "client": name} for name in ("ada", "eve", "cyd", "ada")]
    asked[2]["bytes"] = [0, 10**9]
    message = work(*asked, content=content)
    reply, _ = Node().answer(link.places[1], link._text, message, content)
    ada, eve, cyd, again = reply["replies"]
    assert ada["score"] == again["score"] >= 0 and eve["code"] == "client" and cyd["code"] == "failed"
    assert "its message cannot be at [0, 1000000000]" in capsys.readouterr().out


class _Runtime:
    """Runs coroutines that await nothing; together with `bad` all fail."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []

    def run(self, started):
        self.passes.append(list(started))
        for coroutine in started.values():
            coroutine.close()
        if "bad" in started:
            raise MemoryError("too large")
        return dict.fromkeys(started, "done")


class _Site:
    def __init__(self) -> None:
        self.memory, self.losses, self.fits = {"a": 1}, [1.0], 2


def test_after_a_broken_pass_each_begins_where_it_was():
    runtime, sites = _Runtime(), {"good": _Site(), "bad": _Site(), "gone": OSError("no disk")}
    seen = []

    async def work(site: _Site) -> None: ...

    def start(site: _Site) -> Any:
        seen.append((dict(site.memory), list(site.losses), site.fits))
        site.memory["b"], site.fits = 2, 9
        site.losses.append(3.0)
        return work(site)

    found = fused(runtime, sites, start)
    assert runtime.passes == [["good", "bad"], ["good"], ["bad"]] and seen == [({"a": 1}, [1.0], 2)] * 4
    assert found["good"] == "done" and isinstance(found["bad"], MemoryError) and found["gone"] is sites["gone"]
    assert list(found) == list(sites)
