"""What a server may ask of a node, and name there, whatever configuration and orders say: what the owner's file
decides, built-in methods and tasks, and of others only what the operator allows."""

import json
import os
import random
import sys
import time
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import outside
import pytest
import yaml
from hostile import changed
from network import HELLO, NetworkInProcess, federate, tree, work
from small_run import CLIENTS, Small

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import Secret
from llm_fed.bench import build
from llm_fed.network import flower_app, policy, worker
from llm_fed.network.clients import RemoteClients
from llm_fed.network.node import Node, NodeSettings
from llm_fed.network.policy import Policy
from llm_fed.network.server import train
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import as_dict, from_dict
from llm_fed.state.wire import pack

pytestmark = pytest.mark.usefixtures("quick")
TRAIN = {"kind": "train", "run": "r", "client": "ada", "round": 1, "lr": 0.1, "after": 0, "kept": []}
NOISY = {"clip": 1.0, "noise": 1.0, "where": "client"}


@pytest.fixture(scope="module")
def content(small: Small) -> bytes:
    return pack(build.prepare(from_dict(small.tree()), Reporter()).server.initial())


def text_of(small: Small, **changes: Any) -> str:
    return yaml.safe_dump(as_dict(from_dict(small.tree(**changes))))


def place_of(small: Small, folder: Path, rules: str | None = None) -> NodeSettings:
    path = folder / "policy.yaml"
    if rules is not None:
        path.write_text(rules)
    return NodeSettings(folder / "home", str(small.data), tuple(CLIENTS), policy=None if rules is None else str(path))


def code(reply: dict[str, Any]) -> str:
    """Of the whole message, else of its first order; empty where that is carried out."""
    return str(reply.get("code") or (reply.get("replies") or [reply])[0].get("code", ""))


REFUSED: list[tuple[str, dict[str, Any], str]] = [  # policy, what the server changes, what it is told
    ("configurations: [abc]", {}, "policy.configurations"),
    ("methods: [fedmerge]", {}, "policy.methods"),
    ("bases: [other]", {}, "policy.bases"),
    ("columns: [output]", {}, "policy.columns"),
    ("columns: [instruction]", {"task": {"columns": {"prompt": "instruction", "answer": "output"}}}, "policy.columns"),
    ("columns: [instruction, output]", {"task": {"columns": {"client": "iban"}}}, "policy.columns"),
    ("columns: [instruction, output]", {"task": {"columns": {"extra": ["iban"]}}}, "policy.columns"),
    ("layers: [q_proj]", {}, "policy.layers"),
    ("layers: [q_proj, v_proj]", {"adapter": {"target_modules": ".*(q_proj|o_proj)"}}, "policy.layers"),
    ("noise: 1.0", {}, "policy.noise"),
    ("noise: 1.0", {"privacy": {**NOISY, "noise": 0.9}}, "policy.noise"),
    ("noise: 1.0", {"privacy": {**NOISY, "where": "server"}}, "policy.noise"),
    ("noise: 1.0\nclip: 1.0", {"privacy": {**NOISY, "clip": 1e6}}, "policy.clip"),
    ("clip: 1.0", {}, "policy.noise"),
    ("epsilon: 8.0", {}, "policy.noise"),
    ("epsilon: 1.0", {"privacy": NOISY}, "policy.epsilon"),
    ("batch_size: 4", {}, "policy.batch_size"),
    ("batch_size: 8", {"local": {"batch_size": 8}}, "policy.batch_size"),
    ("batch_size: 4", {"local": {"batch_size": 4, "steps": 1}, "method": {"name": "fedit"}}, ""),
    ("", {"local": {"steps": 10**9}}, "policy.steps"),
    ("", {"local": {"steps": None, "epochs": 10**9}}, "policy.steps"),
    ("steps: 5", {"local": {"steps": None, "epochs": 2}}, "policy.steps"),
    ("", {"method": {"name": "pfedme", "inner_steps": 10**9}}, "failed"),
    ("", {"adapter": {"rank": 65536}}, "policy.rank"),
    ("", {"adapter": {"rank": {"ada": 2, "bob": 65536, "cyd": 2}}, "method": {"name": "hetlora"}}, "policy.rank"),
    ("", {"task": {"max_length": 10**9}}, "policy.length"),
    ("", {"eval": {"max_new_tokens": 10**9}}, "policy.new_tokens"),
    ("disk: 1.0e-09", {}, "policy.disk"),
    ("requests: [answers]", {}, "policy.requests"),
    ("requests: [training]", {"method": {"name": "ifca"}}, "policy.requests"),
    ("requests: [training, answers]", {"method": {"name": "fedmerge"}}, ""),
    ("noise: much", {}, "setup"),
    ("nois: 1.0", {}, "setup"),
]  # fmt: skip


@pytest.fixture(scope="module")
def node() -> Node:
    """Its base is loaded once."""
    return Node()


@pytest.mark.parametrize(("rules", "changes", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_the_owner_does_not_allow_is_refused_with_a_code(
    small, tmp_path, content, node, capsys, rules, changes, said
):
    place = place_of(small, tmp_path, rules)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/old").touch()
    if changes.get("method", {}).get("name") in ("ifca", "fedmerge"):  # whose messages are others
        built = build.prepare(from_dict(small.tree(**changes)), Reporter())
        message = built.method.broadcast(built.method.init(built.server), "ada")
        content = pack({**message, "assigned": None} if isinstance(message, dict) else message)
    reply, _ = node.answer(place, text_of(small, **changes), work(TRAIN, content=content), content)
    assert code(reply) == said, reply
    assert not said or f"{said}: " in capsys.readouterr().out


def test_the_defaults_are_those_of_no_file_and_the_example_names_every_field(small, tmp_path):
    (tmp_path / "empty.yaml").touch()
    assert policy.read(str(tmp_path / "empty.yaml")) == policy.read(None) == Policy()
    config = from_dict(small.tree())
    flower_app.write(tmp_path / "app", config, "app")
    example, agreed = tmp_path / "app/node-policy.yaml", (tmp_path / "app/federation/config.yaml").read_text()
    assert policy.read(str(example)) == Policy(configurations=(policy.digest(agreed),))
    policy.read(str(example)).check_text(agreed)
    every = tmp_path / "every.yaml"
    lines = example.read_text().partition("\n\n")[2].splitlines()
    every.write_text("\n".join(line.removeprefix("# ") for line in lines))
    assert [*yaml.safe_load(every.read_text())] == [field.name for field in fields(Policy)]
    said = policy.read(str(every))
    limits = ("steps", "rank", "length", "new_tokens", "disk", "hours", "delta")
    assert all(getattr(said, key) == getattr(Policy(), key) for key in limits)


def test_without_data_and_names_from_its_operator_a_node_serves_nothing(small, tmp_path, node):
    """The configuration names data of this machine, and a column whose values would be the clients."""
    place = place_of(small, tmp_path)
    for lacks in ({"path": None}, {"path": ""}, {"clients": ()}):
        assert code(node.answer(replace(place, **lacks), text_of(small), HELLO, b"")[0]) == "setup"
    only = node.answer(replace(place, clients=("bob",)), text_of(small), HELLO, b"")[0]
    assert only["clients"] == {"bob": 6} and "ada" not in json.dumps(only)


def test_a_panic_of_a_tokenizer_ends_its_order_alone(small, tmp_path, node, monkeypatch):
    class PanicException(BaseException):
        """As pyo3 raises it."""

    def panics(*_):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(node, "_work", panics)
    reply, answer = node.answer(place_of(small, tmp_path), text_of(small), work(TRAIN), b"")
    assert code(reply) == "failed" and "bounds" not in json.dumps(reply) and answer == b""


MARK = "Zq7Geheim"


def marked(folder: Path) -> Path:
    """Rows in which every cell that is not needed to be whole is marked, as is the name of a folder that is not
    served."""
    for client in (*CLIENTS, f"{MARK}-ward"):
        (folder / client).mkdir(parents=True)
        rows = [
            {
                "instruction": f"w{20 + i} {MARK}", "output": f"w4 {MARK}", "iban": f"{MARK}{i}", "verdict": MARK,
                "age": f"{i}{MARK}", "talk": [{"role": MARK, "content": MARK}], "better": MARK, "worse": f"{MARK}2",
                "choice": [MARK, f"{MARK}2"], "note": f"{MARK} w3", "side": MARK,
            }
            for i in range(8)
        ]  # fmt: skip
        (folder / client / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / client / f"{MARK}.txt").write_text(MARK)
    return folder


_COLUMNS = ("instruction", "output", "iban", "verdict", "age", "talk", "better", "worse", "choice", "note", "side")
_ROLES = ("prompt", "input", "answer", "options", "client", "messages", "system", "history", "text", "chosen", "label")


def quoting(draw: random.Random) -> dict[str, Any]:
    """Settings at which readers of rows, metrics and losses refuse cells."""
    roles = {role: draw.choice(_COLUMNS) for role in draw.sample(_ROLES, draw.randint(0, 4))}
    task: dict[str, Any] = {"columns": roles, "name": draw.choice(("files", "files", "classification", "regression"))}
    task |= {"labels": ["a", "b"]} if draw.random() < 0.3 else {}
    task["bad_rows"] = draw.choice(("stop", "skip"))
    roles |= {"extra": ["age"]} if draw.random() < 0.2 else {}
    changes: dict[str, Any] = {"task": task, "eval": {"metric": draw.choice((None, "rouge1", "option_accuracy"))}}
    changes |= {"objective": {"name": draw.choice(("dpo", "kto"))}} if draw.random() < 0.3 else {}
    changes |= {"base": {"kind": "sequence-classification"}} if draw.random() < 0.1 else {}
    return changes


def hostile(tree: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Nested values with one to three changes, as JSON carries them."""
    for _ in range(draw.randint(1, 3)):
        with suppress(ValueError, RecursionError):
            tree = json.loads(json.dumps(changed(deepcopy(tree), draw)))
    return tree


def attack(node: Node, small: Small, folder: Path, content: bytes, examples: int, seed: int) -> dict[str, int]:
    """How often which code was told, of so many messages whose settings, or fields of orders, are hostile. The server
    learns no cell and no place of this machine, nothing is written elsewhere, and nobody waits. AssertionError: a
    finding."""
    draw, codes = random.Random(seed), dict[str, int]()
    place = replace(place_of(small, folder), path=str(marked(folder / "data")))
    before = sorted(os.listdir(folder))
    for number in range(examples):
        settings, message = small.tree(), work({**TRAIN, "kind": draw.choice(("train", "evaluate"))}, content=content)
        message["orders"][0] |= {"split": "test"} if message["orders"][0]["kind"] == "evaluate" else {}
        way = draw.randrange(3)
        if way == 0:
            settings = small.tree(**quoting(draw))
        elif way == 1:
            settings = hostile(settings, draw)
        else:
            message = hostile(message, draw)
        message, text = HELLO if draw.random() < 0.3 else message, json.dumps(settings)  # which is YAML, too
        began = time.monotonic()
        reply, answer = node.answer(place, text, message if isinstance(message, dict) else {}, content)
        said, case = json.dumps(reply), f"seed {seed}, number {number}: {text} {message}"
        assert MARK not in said and str(folder) not in said and MARK.encode() not in answer, f"{said} {case}"
        assert time.monotonic() - began < 60, case
        assert sorted(os.listdir(folder)) in (before, sorted({*before, "home"})), case
        codes[code(reply)] = codes.get(code(reply), 0) + 1
    return codes


def test_no_error_and_no_setting_tells_the_server_what_stands_in_rows(small, tmp_path, content, node, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = attack(node, small, tmp_path, content, 30, 1)
    assert codes.keys() >= {"", "failed"} and sum(codes.values()) == 30, codes


@pytest.mark.slow
def test_none_of_many(small, tmp_path, content, node, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # orders name bases that nobody has
    codes = attack(node, small, tmp_path, content, 3000, 2)
    assert codes[""] > 100 and codes["failed"] > 100, codes


# What may be named


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
