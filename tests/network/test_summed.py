"""`privacy.secure` over a network: the sums of one process, and what happens when clients vanish, lie, or are asked
for what they must not tell."""

import json
import os
import shutil
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric import ec
from disk_faults import Camera
from network import NetworkInProcess, lines, tree

from llm_fed.basics.errors import RunError, UserError
from llm_fed.experiment import run as experiment
from llm_fed.federation import summing
from llm_fed.network import node, peers, server
from llm_fed.network.link import Reply
from llm_fed.network.policy import Policy
from llm_fed.network.refusals import Refused
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.secure.party import Party
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State
from llm_fed.state.outline import leaves
from llm_fed.state.wire import pack

NAMES = tuple(f"c{place}" for place in range(7))  # five of them open a secret
WAIT = {"clients": list(NAMES), "deadline": 30.0, "patience": 60.0}


def seven(small: Any, folder: Path) -> Any:
    """Seven clients with the rows of three."""
    for place, name in enumerate(NAMES):
        shutil.copytree(small.data / ("ada", "bob", "cyd")[place % 3], folder / name)
    return replace(small, data=folder)


def private_key(path: Path) -> ec.EllipticCurvePublicKey:
    key = ec.generate_private_key(ec.SECP384R1())
    form = keys.Encoding.PEM, keys.PrivateFormat.OpenSSH, keys.NoEncryption()
    path.write_bytes(key.private_bytes(*form))
    return key.public_key()


def line_of(name: str, key: ec.EllipticCurvePublicKey) -> str:
    return f"{name} {key.public_bytes(keys.Encoding.OpenSSH, keys.PublicFormat.OpenSSH).decode()}\n"


class SecureNetwork(NetworkInProcess):
    """In one process, with nodes that have registered keys.

    Attributes:
        traffic: all bytes that crossed, in both directions.
        change: what comes in the place of an order that is sent to a node.
    """

    def __init__(self, folder: Path, *more: Any, change: Any = lambda order: order, **options: Any):
        super().__init__(folder, *more, nodes=[(name,) for name in NAMES], **options)
        self.traffic: list[bytes] = []
        self.change, registered = change, folder / "peers"
        folder.mkdir(exist_ok=True)
        for number, place in self.places.items():
            key = folder / f"key-{place.clients[0]}"
            if not key.exists():
                with open(registered, "a") as file:
                    file.write(line_of(place.clients[0], private_key(key)))
            self.places[number] = replace(place, key=str(key), peers=str(registered))

    def _carry_out(self, node: int, message: Any, content: bytes) -> str:
        if "orders" in message:
            message = {**message, "orders": [self.change(dict(order)) for order in message["orders"]]}
        self.traffic += [json.dumps(message).encode(), content]
        id = super()._carry_out(node, message, content)
        came = self._replies.get(id, Reply({}))
        self.traffic += [json.dumps(dict(came.content)).encode(), came.answer]
        return id


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def clients(small, tmp_path_factory):
    return seven(small, tmp_path_factory.mktemp("seven"))


def settings(clients, **changes):
    secure = {"secure": True} | changes.pop("privacy", {})
    network = WAIT | changes.pop("network", {})
    return tree(
        clients, **{"rounds": 2, "eval": {"every": 0, "base": False}, **changes}, network=network, privacy=secure
    )


def states(folder: Path) -> list[State]:
    """Of the newest checkpoint."""
    return [leaf for _, leaf in leaves(Checkpoints(folder / "run/checkpoints").latest().state["state"])
            if isinstance(leaf, State)]  # fmt: skip


def events(folder: Path) -> list[tuple[int, str, str, str]]:
    return [(e["round"], e["client"], e["event"], e["reason"]) for e in lines(folder, "event")]


def federate(folder: Path, clients, tree, **options):
    link = SecureNetwork(folder, clients, tree, **options)
    return link, server.train(link.config, folder / "run", link)


@pytest.mark.parametrize("method", ["fedit", "scaffold"])
def test_sums_are_those_of_one_process_and_of_the_plain_run(clients, tmp_path, method):
    sgd = {"optimizer": "sgd", "lr": 0.5, "lr_end": 0.5} if method == "scaffold" else {}
    wanted = settings(clients, method={"name": method}, local=sgd, privacy={"bound": 50.0})
    link, _ = federate(tmp_path / "there", clients, wanted)
    experiment.train(from_dict(wanted), tmp_path / "here/run")
    plain = deepcopy(wanted) | {"privacy": {}}
    experiment.train(from_dict(plain), tmp_path / "plain/run")
    step = 50.0 / 2**28
    for there, here, without in zip(*(states(tmp_path / name) for name in ("there", "here", "plain")), strict=True):
        torch.testing.assert_close(there.row, here.row, rtol=1e-4, atol=100 * step)
        torch.testing.assert_close(there.row, without.row, rtol=1e-4, atol=100 * step)
        assert bool(there.row.any())
    assert not events(tmp_path / "there")
    told = lines(tmp_path / "there", "client")
    assert [(line["round"], line["client"]) for line in told] == [(r, name) for r in (1, 2) for name in NAMES]
    assert all("loss" not in line for line in told)
    kinds = [o["kind"] for o in link.orders if o.get("client") == "c0" and o["kind"] not in ("evaluate", "finish")]
    assert kinds == ["prepare", "train", "reveal"] * 2
    sent = [node for node, _ in link.messages]
    assert sent.count(1) == 8  # two phases a round and one more; and to greet, to score, and to finish


def test_no_update_and_no_secret_stands_in_the_messages_of_a_run(clients, tmp_path, monkeypatch):
    """What a client adds to a sum, what it draws, and its keys are searched for in all that crossed."""
    hidden: list[bytes] = []
    encode, prepare = summing.numbers, Party.prepare

    def numbers(upload, *more):
        part = encode(upload, *more)
        hidden.extend(
            [part.numpy().tobytes()[:64], torch.cat([s.row for _, s in leaves(upload)]).numpy().tobytes()[:64]]
        )
        return part

    def prepared(self, *more):
        said = prepare(self, *more)
        for secret in [*self.memory["round"]["secrets"].values(), self.memory["channel"]]:
            hidden.extend([secret.encode(), bytes.fromhex(secret)])
        return said

    monkeypatch.setattr(summing, "numbers", numbers)
    monkeypatch.setattr(Party, "prepare", prepared)
    link, _ = federate(tmp_path, clients, settings(clients))
    assert len(hidden) == 2 * 7 * (2 + 8) and len(link.traffic) > 40
    mean = states(tmp_path)[0]
    assert any(mean.row.numpy().tobytes()[:64] in each for each in link.traffic)  # what is sent in the open is found
    for each in link.traffic:
        assert not any(secret in each for secret in hidden)


def lost(kind: str, names: tuple[str, ...], round: int = 1):
    """These clients never answer to orders of one kind in a round."""

    def spoil(order, reply):
        mine = order["kind"] == kind and order.get("round") == round and order["client"] in names
        return Reply({"error": "lost"}) if mine else reply

    return spoil


@pytest.mark.parametrize("kind", ["prepare", "train", "reveal"])
def test_who_vanishes_is_not_in_the_sum_or_the_sum_is_given_up(clients, tmp_path, kind):
    wanted = settings(clients, rounds=1)
    two, three = ("c1", "c4"), ("c1", "c4", "c5")
    federate(tmp_path / "two", clients, wanted, spoil=lost(kind, two))
    came = [line["client"] for line in lines(tmp_path / "two", "client")]
    assert came == [name for name in NAMES if kind == "reveal" or name not in two]
    assert {(e[1], e[2]) for e in events(tmp_path / "two")} == {(name, "client failed") for name in two}
    federate(tmp_path / "three", clients, wanted, spoil=lost(kind, three))
    given_up = [e for e in events(tmp_path / "three") if e[2] == "round given up"]
    assert len(given_up) == 1 and not lines(tmp_path / "three", "client")
    assert not states(tmp_path / "three")[0].equal(states(tmp_path / "two")[0])


@pytest.mark.parametrize("kind", ["prepare", "train"])
def test_a_client_that_comes_back_takes_part_in_the_next_round(clients, tmp_path, kind):
    federate(tmp_path, clients, settings(clients), spoil=lost(kind, ("c1",)))
    came = [(line["round"], line["client"]) for line in lines(tmp_path, "client")]
    assert came == [(1, name) for name in NAMES if name != "c1"] + [(2, name) for name in NAMES]


def in_the_clear(order, reply):
    if order["kind"] == "train" and order["client"] == "c2" and order["round"] == 1:
        return Reply(reply.content, pack(State.of({"w": torch.ones(4)})))
    return reply


def test_who_answers_in_the_clear_or_with_nothing_that_fits_is_refused(clients, tmp_path):
    federate(tmp_path, clients, settings(clients), spoil=in_the_clear)
    assert [e[:3] for e in events(tmp_path)] == [(1, "c2", "refused upload")]
    assert len(lines(tmp_path, "client")) == 6 + 7


@pytest.mark.parametrize("lie", [{"locks": 3, "locked": "zz"}, {"locks": {}, "locked": 7}, {}])
@pytest.mark.parametrize("kind", ["prepare", "train", "reveal"])
def test_a_node_that_says_nonsense_in_a_phase_ends_no_run(clients, tmp_path, kind, lie):
    def spoil(order, reply):
        mine = order["kind"] == kind and order["client"] == "c3" and order.get("round") == 1
        kept = {key: reply.content[key] for key in ("ask", "examples") if key in reply.content} if mine else {}
        return Reply({**kept, **lie}, reply.answer) if mine else reply

    federate(tmp_path, clients, settings(clients, rounds=1), spoil=spoil)
    assert len(lines(tmp_path, "client")) == (7 if kind == "reveal" else 6)


def test_nan_at_one_client_ends_that_one_alone(clients, tmp_path, monkeypatch):
    monkeypatch.setattr(node, "infinite_flaw", lambda update: "it holds NaN" if nan.pop("now", False) else "")
    nan = {"now": True}
    federate(tmp_path, clients, settings(clients, rounds=1))
    assert [e[1:3] for e in events(tmp_path)] == [("c0", "client failed")] and len(lines(tmp_path, "client")) == 6


def swapped(order):
    if order["kind"] == "prepare" and order["client"] == "c0":
        order["certificates"] = {**order["certificates"], "c1": order["certificates"]["c2"]}
    return order


def with_a_sybil(order):
    if order["kind"] == "prepare":
        order["cohort"] = {**order["cohort"], "names": [*order["cohort"]["names"], "eve"]}
    return order


def all_but_one_dropped(order):
    if order["kind"] == "reveal":
        order["alive"] = [order["client"]]
    return order


def another_model(order):
    if order["kind"] == "train" and order["client"] == "c0":
        order["largest"] = 10**6
    return order


@pytest.mark.parametrize(
    "change, code, failed", [(swapped, "secure.keys", {"c0"}), (with_a_sybil, "secure.strangers", {*NAMES}),
                             (all_but_one_dropped, "secure.vanished", {*NAMES}),
                             (another_model, "secure.proof", {*NAMES})],
)  # fmt: skip
def test_a_server_that_lies_is_told_a_code_and_nothing_else(clients, tmp_path, change, code, failed):
    federate(tmp_path, clients, settings(clients, rounds=1), change=change)
    told = [e for e in events(tmp_path) if e[2] == "client failed"]
    assert {e[1] for e in told} == failed
    assert all(code in e[3] and "does not do what might open its update" in e[3] for e in told)


@pytest.mark.parametrize("names, left", [(("c0",), 6), (NAMES[:3], 0)])
def test_clients_that_train_unlike_are_in_no_sum_together(clients, tmp_path, names, left):
    """A learning rate of its own for some: they are refused, and without them the others may be too few."""

    def change(order):
        return {**order, "lr": 0.0} if order["kind"] == "train" and order["client"] in names else order

    federate(tmp_path, clients, settings(clients, rounds=1), change=change)
    assert [e[1:3] for e in events(tmp_path) if e[1]] == [(name, "refused upload") for name in names]
    assert len(lines(tmp_path, "client")) == left


def test_a_server_that_is_killed_goes_on_and_no_round_is_opened_twice(clients, tmp_path):
    """Before its answers are there a round is begun again; after it was opened it is given up. The order to prepare
    round 2 travels with the one that opens round 1."""

    class Killed(BaseException):
        pass

    wanted = settings(clients, rounds=3)
    for place, (kind, opened) in enumerate([("prepare", 1), ("train", 0), ("reveal", 2)]):
        folder = tmp_path / str(place)

        def die(order, reply, kind=kind):
            if order["kind"] == kind and order.get("round") == 2 and order["client"] == "c6":
                raise Killed
            return reply

        link = SecureNetwork(folder, clients, wanted, die)
        with pytest.raises(Killed):
            server.train(link.config, folder / "run", link)
        again = SecureNetwork(folder, clients, wanted)
        server.train(again.config, folder / "run", again)
        rounds = {line["round"] for line in lines(folder, "client")}
        assert rounds == {1, 2, 3} - {opened}, kind
        assert sum("secure.again" in e[3] for e in events(folder)) == (7 if opened else 0)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("writes", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (10, 17, 24)), 31])
def test_a_kill_at_any_write_of_a_client_ends_no_run(clients, tmp_path, monkeypatch, writes, after):
    """While clients say their keys, prepare, mask or reveal; before or after what they remember is on the disk."""

    class Killed(BaseException):
        pass

    write, left = peers.write_file, [writes]

    def dying(*given, **more):
        left[0] -= 1
        if left[0] or after:
            write(*given, **more)
        if not left[0]:
            raise Killed

    wanted = settings(clients)
    monkeypatch.setattr(peers, "write_file", dying)
    link = SecureNetwork(tmp_path, clients, wanted)
    with pytest.raises(Killed):
        server.train(link.config, tmp_path / "run", link)
    again = SecureNetwork(tmp_path, clients, wanted)
    server.train(again.config, tmp_path / "run", again)
    given_up = [e[0] for e in events(tmp_path) if e[2] == "round given up"]
    came = Counter(line["round"] for line in lines(tmp_path, "client"))
    assert came[2] == 7 and given_up in ([], [1])  # who has revealed its part in round 1 does so once
    assert came[1] == 0 if given_up else came[1] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_a_kill_at_any_operation_on_a_file_ends_no_run(clients, tmp_path, part):
    """Of the server or of a node. From each state of all folders the run goes on; a round is opened with at least
    five of seven clients, or given up."""
    whole, shots, wanted = tmp_path / "whole", tmp_path / "shots", settings(clients)
    link = SecureNetwork(whole, clients, wanted)
    if not (child := os.fork()):  # what listens to operations cannot be taken away any more
        try:
            camera = Camera(whole, shots)
            camera._take()  # the keys are whole already
            shutil.rmtree(shots)
            camera.arm()
            server.train(link.config, whole / "run", link)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    states = sorted(shots.iterdir())[part::8]
    for state in states:
        shutil.rmtree(whole)
        shutil.copytree(state, whole)
        again = SecureNetwork(whole, clients, wanted)
        server.train(again.config, whole / "run", again)
        came = Counter(line["round"] for line in lines(whole, "client"))
        lost = [round for round, _, event, _ in events(whole) if event == "round given up"]
        assert len(lost) <= 1, state.name
        assert all(came[round] == 0 if round in lost else came[round] >= 5 for round in (1, 2)), (state.name, came)
    assert len(states) > 5


def test_what_the_owner_must_give_and_what_it_may_forbid(clients, tmp_path):
    folder = tmp_path
    one, other = (private_key(folder / name) for name in ("one", "other"))
    (folder / "peers").write_text(f"# keys\n{line_of('ada,bob', one)}\n{line_of('cyd', other)}")
    known = peers.read(str(folder / "peers"))
    assert [*known] == ["ada", "bob", "cyd"] and known["ada"] == known["bob"] != known["cyd"]
    assert peers.identity(str(folder / "one"), ("ada", "bob"), known).public_key() == one
    bad = {
        "needs peers=": None,
        "lines 1 and 2 have one key": line_of("ada", one) + line_of("bob", one),
        "ada stands there twice": line_of("ada", one) + line_of("ada", other),
        "cannot be read": "ada nonsense\n",
        "is no ecdsa key": "ada ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPKKrpOyNNWYzRTMrbCCfVY2WNOqBbPbSG3pTTUKIc3\n",
    }
    for said, text in bad.items():
        (folder / "bad").write_text(text or "")
        with pytest.raises(Refused, match=said):
            peers.read(str(folder / "bad") if text else None)
    for path, names in ((folder / "one", ("cyd",)), (folder / "nothing", ("ada",)), (folder / "one", ("eve",))):
        with pytest.raises(Refused, match="--node-config key"):
            peers.identity(str(path), names, known)
    plain = from_dict(settings(clients) | {"privacy": {}})
    Policy().check(plain)
    Policy(secure=True).check(from_dict(settings(clients)))
    with pytest.raises(Refused, match="the policy has secure=True"):
        Policy(secure=True).check(plain)


def test_without_its_key_a_node_takes_no_part(clients, tmp_path, capfd):
    link = SecureNetwork(tmp_path, clients, settings(clients, rounds=1, network={"wait": 0.1}))
    link.places = {node: replace(place, key=None) for node, place in link.places.items()}
    with pytest.raises(RunError, match="no client has come"):
        server.train(link.config, tmp_path / "run", link)
    assert 'privacy.secure needs key="FILE" in --node-config' in capfd.readouterr().out


def test_two_clients_are_refused_before_the_first_round(clients, tmp_path):
    wanted = settings(clients, network={"clients": ["c0", "c1"]})
    link = SecureNetwork(tmp_path, clients, wanted)
    with pytest.raises(UserError, match="3 to 65,535 clients in a round, and 2 are asked"):
        server.train(link.config, tmp_path / "run", link)
    assert not any(order["kind"] == "prepare" for order in link.orders)


def test_with_central_noise_too(clients, tmp_path):
    """The noise is added after the sum, so epsilon is that of the plain run."""
    private = {"clip": 1.0, "noise": 1.0}
    federate(tmp_path, clients, settings(clients, rounds=1, privacy=private))
    experiment.train(from_dict(settings(clients, rounds=1, privacy=private | {"secure": False})), tmp_path / "here/run")
    there, here = (lines(folder, "privacy") for folder in (tmp_path, tmp_path / "here"))
    assert there == here and len(there) == 1
