"""Over Flower itself, with real processes: SuperLink with TLS and keys, three SuperNodes with data of their own."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import classifiers
import psutil
import pytest
from flower_deployment import Deployment
from network import adapters, assert_same_models
from preference_files import pairs_of
from small_run import CLIENTS, Small

from llm_fed.experiment import run as experiment
from llm_fed.network import flower_app
from llm_fed.runs.records import read_records
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import from_dict

pytestmark = pytest.mark.slow


def settings(small: Small, **changes: Any) -> Config:
    network = {"clients": sorted(CLIENTS), "deadline": 120.0, "patience": 600.0} | changes.pop("network", {})
    return from_dict(small.tree(network=network, **changes))


def deploy(folder: Path, small: Small) -> Deployment:
    nodes = {}
    for client in CLIENTS:
        shutil.copytree(small.data / client, folder / f"data-{client}" / client)
        nodes[client] = {"home": str(folder / f"home-{client}"), "path": str(folder / f"data-{client}"), "idle": 300}
        nodes[client]["clients"] = client
    return Deployment(folder / "net", nodes)


def equal(here: Path, folder: Path, exactly: bool = False) -> None:
    """The scores and personal models of a run in one process, and of one over the network, whose server has no rows."""
    one, other = (json.loads((run / "summary.json").read_text()) for run in (here, folder / "run"))
    one.get("rule", {}).pop("look-up", None)
    one, other = ({key: run[key] for key in run.keys() - {"examples", "checksum"}} for run in (one, other))
    assert one == other
    assert_same_models(here, folder, 0 if exactly else 1e-5)


# What a node does that does not keep to the rules, by round; the wire, the worker and the other nodes are as always.
SPOILING = '''
"""Bob's answers are spoilt, each round in another way."""

import json
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from llm_fed.network import flower
from llm_fed.state.wire import pack, unpack

honest = flower.client_app(__file__)
app = ClientApp()


@app.train()
def train(message, context):
    reply, home = honest(message, context), Path(context.node_config["home"])
    order = flower._opened(message.content)[0].get("orders", [{}])[0]
    if not home.name.endswith("bob") or order.get("kind") != "train":
        return reply
    old, (said, answer) = home / "old", flower._opened(reply.content)
    if order["round"] == 1:
        old.write_bytes(json.dumps(said).encode() + b"|" + answer)
        return reply
    if order["round"] == 6:
        words, answer = old.read_bytes().split(b"|", 1)
        said = json.loads(words)
    else:
        state = unpack(answer)
        answer = {
            2: b"garbage",
            3: pack(state.like(state.row * float("nan"))),
            4: pack(state.pick(list(state.layout.names)[1:])),
            5: answer * 100,
        }.get(order["round"], answer)
        said["replies"][0]["bytes"] = [0, len(answer)]
    return Message(flower._record(said, answer), reply_to=message)
'''


def until(true: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_records(folder / "run/metrics.jsonl") if line["kind"] == kind]


def test_fedmerge_over_flower_is_fedmerge_in_one_process(small, tmp_path):
    """Three rounds, evaluation and export at each client; one base per node; the bytes are those counted."""
    config = settings(small, method={"name": "fedmerge"})
    experiment.train(config, tmp_path / "here")
    flower_app.write(tmp_path / "app", config, "small")
    with deploy(tmp_path, small) as net:
        run = net.run(tmp_path / "app", {"out": str(tmp_path / "run")})
        assert net.wait(run, 500) == "finished:completed", net.logs(run)
        traffic = net.describe(run)["network-traffic"]
        assert "round 3/3" in net.logs(run)
    equal(tmp_path / "here", tmp_path)
    for client in CLIENTS:
        log = (tmp_path / f"home-{client}/worker.log").read_text()
        assert "bases loaded so far: 1" in log and "so far: 2" not in log
    rounds = records(tmp_path, "round")
    up = sum(line["bytes_up"] for line in rounds)
    # Beside the uploads there are six replies from each of three nodes, and Flower's envelope of each: to the greeting,
    # the first round, the two others with the scores before them, the last scores, and the end.
    assert up < traffic["inbound-bytes"] < up + 6 * 3 * 2500


def test_sums_that_nobody_sees_through_over_flower_are_those_in_one_process(small, tmp_path):
    """Each node signs with the key that Flower is given, and knows the others by the file that keys.py writes."""
    config = settings(small, privacy={"secure": True, "bound": 50.0})
    experiment.train(config, tmp_path / "here")
    flower_app.write(tmp_path / "app", config, "small")
    net = deploy(tmp_path, small)
    keys = net.folder / "keys"
    net.nodes = {
        name: {**node, "key": str(keys / name), "peers": str(keys / "peers")} for name, node in net.nodes.items()
    }
    with net:
        run = net.run(tmp_path / "app", {"out": str(tmp_path / "run")})
        assert net.wait(run, 500) == "finished:completed", net.logs(run)
    assert_same_models(tmp_path / "here", tmp_path, 1e-4)
    assert not records(tmp_path, "event")
    came = records(tmp_path, "client")
    assert len(came) == 3 * 3 and not any("loss" in line for line in came)


@pytest.mark.parametrize("kind", ["preferences", "labels"])
def test_other_kinds_over_flower_are_those_in_one_process(kind, small, tmp_path):
    """Pairs with the client's own last model as the reference, and texts with labels under a head."""
    data = tmp_path / "data"
    if kind == "labels":
        tree = classifiers.tree(classifiers.written(tmp_path / "roberta", "roberta"), classifiers.federation(data))
        tree["task"]["labels"] = list(classifiers.LABELS)
    else:
        changes = {"objective": {"name": "dpo", "beta": 0.5, "reference": "last"}}
        tree = small.tree(
            task={"path": str(pairs_of(small.data, data))}, eval={"metric": None, "base": False}, **changes
        )
    tree["network"] = {"clients": sorted(CLIENTS), "deadline": 120.0, "patience": 600.0}
    config = from_dict(tree)
    here = experiment.train(config, tmp_path / "here")
    flower_app.write(tmp_path / "app", config, kind)
    with deploy(tmp_path, replace(small, data=data)) as net:
        run = net.run(tmp_path / "app", {"out": str(tmp_path / "run")})
        assert net.wait(run, 500) == "finished:completed", net.logs(run)
    there = json.loads((tmp_path / "run/summary.json").read_text())
    assert there["scores"]["clients"] == here["scores"]["clients"]
    assert_same_models(tmp_path / "here", tmp_path, 1e-4)


def test_faults_over_flower(small, tmp_path):
    """A SuperNode killed at work that stays away, a server killed and begun again, and the node come back."""
    config = settings(small, rounds=4, method={"name": "fedalt"}, network={"deadline": 30.0, "patience": 60.0})
    flower_app.write(tmp_path / "app", config, "small")
    with deploy(tmp_path, small) as net:
        net.run(tmp_path / "app", {"out": str(tmp_path / "run")})
        until(lambda: (tmp_path / "run/checkpoints/round-0001").exists())
        until(lambda: net.processes("bob", "flwr-clientapp"))
        net.kill("bob", "flower-supernode")
        until(lambda: any(line["client"] == "bob" for line in records(tmp_path, "event")))
        missed = next(line["round"] for line in records(tmp_path, "event"))
        until(lambda: (tmp_path / f"run/checkpoints/round-{missed:04d}").exists())
        net.kill("superlink", "flwr-serverapp")
        before = int(max((tmp_path / "run/checkpoints").glob("round-*")).name[-4:])
        net.start_node("bob")
        again = net.run(tmp_path / "app", {"out": str(tmp_path / "run")})
        assert net.wait(again, 500) == "finished:completed", net.logs(again)
        assert f"continuing at round {before + 1}" in net.logs(again)
    (missing,) = {line["client"] for line in records(tmp_path, "event")}
    assert missing == "bob"
    rounds = [line["round"] for line in records(tmp_path, "round")]
    assert rounds == [1, 2, 3, 4]
    answered = [(line["round"], line["client"]) for line in records(tmp_path, "client")]
    assert len(answered) == len(set(answered)), "an upload counted twice"
    assert {client for _, client in answered} == set(CLIENTS)
    for client in CLIENTS:
        assert adapters(tmp_path / f"home-{client}/adapters/run" / client)


@pytest.mark.parametrize("command", ["flower-supernode", "flower-superexec"])
def test_a_worker_at_work_ends_with_its_node(small, tmp_path, command):
    """The two others' stay. Flower's own processes are recognised, whatever its next version calls them."""
    config = settings(small, rounds=1, local={"steps": 10_000}, eval={"every": 0})
    flower_app.write(tmp_path / "app", config, "small")
    with deploy(tmp_path, small) as net:
        net.run(tmp_path / "app", {"out": str(tmp_path / "run")})
        until(lambda: list((tmp_path / "home-bob/runs").glob("*/bob")))
        (worker,) = net.processes("bob", "llm_fed.network.worker")
        net.reaped("bob")
        net.kill("bob", command)
        until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 60)
        assert "its node has ended" in (tmp_path / "home-bob/worker.log").read_text()
        assert net.processes("ada", "llm_fed.network.worker") and net.processes("cyd", "llm_fed.network.worker")


def test_a_node_that_does_not_keep_to_the_rules_and_a_full_disk_over_flower(small, tmp_path):
    """Garbage, NaN, another shape, a hundred times the size, an old answer again: refused, and the run goes on. Cyd's
    disk takes no checkpoint in one round, and she continues from the round before."""
    config = settings(small, rounds=7, method={"name": "fedalt"}, eval={"every": 0})
    flower_app.write(tmp_path / "app", config, "small")
    (tmp_path / "app/federation/client.py").write_text(SPOILING)
    with deploy(tmp_path, small) as net:
        run = net.run(tmp_path / "app", {"out": str(tmp_path / "run")})
        until(lambda: (tmp_path / "run/checkpoints/round-0001").exists())
        (worker,) = net.processes("cyd", "llm_fed.network.worker")
        worker.rlimit(psutil.RLIMIT_FSIZE, (256, psutil.RLIM_INFINITY))
        until(lambda: any(line["client"] == "cyd" for line in records(tmp_path, "event")))
        worker.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        assert net.wait(run, 500) == "finished:completed", net.logs(run)
    events = {(line["client"], line["round"]): line["reason"] for line in records(tmp_path, "event")}
    words = ["not a message", "NaN", "has no", "bytes, and at most", "another order"]
    assert [client for client, _ in events].count("bob") == 5
    for round, word in enumerate(words, 2):
        assert word in events["bob", round]
    full = [round for client, round in events if client == "cyd"]
    assert full and all("the node could not do it (failed)" in events["cyd", round] for round in full)
    refused = {line["round"]: line["refused"] for line in records(tmp_path, "round")}
    assert refused == {1: 0, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 0}
    answered = {line["round"] for line in records(tmp_path, "client") if line["client"] == "cyd"}
    assert answered == set(range(1, 8)) - set(full)
