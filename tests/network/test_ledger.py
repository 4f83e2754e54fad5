"""What a client has released stays in its node's ledger, whatever a server forgets, repeats or goes back to."""

import errno
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from network import NetworkInProcess, lines, tree, work
from rich.console import Console
from small_run import CLIENTS, Small

from llm_fed.bench import build
from llm_fed.experiment import run as experiment
from llm_fed.federation.privacy import composed
from llm_fed.network import ledger, server
from llm_fed.network.ledger import Ledger
from llm_fed.network.node import Node, NodeSettings
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import as_dict, from_dict
from llm_fed.state.wire import pack

pytestmark = pytest.mark.usefixtures("quick")
NOISY = {"privacy": {"clip": 1.0, "noise": 4.0, "where": "client"}}
OF_EXAMPLES = {"privacy": {"unit": "example", "clip": 1.0, "noise": 1.0}}
TRAIN = {"kind": "train", "run": "r", "client": "ada", "round": 1, "lr": 0.1, "after": 0, "kept": []}


class One:
    """A node, and orders to train, each answered by a code or by its bytes."""

    def __init__(self, small: Small, folder: Path, changes: dict[str, Any], rules: str = ""):
        (folder / "policy.yaml").write_text(rules)
        self.place = NodeSettings(folder / "home", str(small.data), tuple(CLIENTS), policy=str(folder / "policy.yaml"))
        self._text = yaml.safe_dump(as_dict(from_dict(small.tree(**changes))))
        self._content = pack(build.prepare(from_dict(small.tree()), Reporter()).server.initial())
        self.node = Node()

    def train(self, **says: Any) -> bytes | str:
        message = work({**TRAIN, **says}, content=self._content)
        reply, answer = self.node.answer(self.place, self._text, message, self._content)
        self.reply = reply.get("replies", [reply])[0]
        return self.reply.get("code") or answer

    @property
    def written(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.place.home / "ledger/ada/released.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("changes", [NOISY, OF_EXAMPLES], ids=["of a client", "of examples"])
def test_the_same_order_has_the_same_answer(small, tmp_path, changes):
    """Also under another request, and from another process; another order has noise of its own."""
    one = One(small, tmp_path, changes)
    first = one.train()
    assert {one.train(ask=str(number), kept=[number]) for number in range(10)} == {first}
    one.node = Node()
    assert one.train() == first and len(one.written) == 1
    others = {one.train(lr=0.2), one.train(run="s"), one.train(round=2, after=1), one.train(round=3)}
    assert len({*others, first}) == 5 and len(one.written) == 5
    assert one.train(run="s") in others and len(one.written) == 5
    assert one.train(client="eve") == "client"


def test_beyond_the_budget_nothing_leaves(small, tmp_path, monkeypatch):
    """Three answers of noise 4 may; under whatever run, round or rate."""
    most = composed({(2.0, 1.0): 3}, 1e-5)
    one = One(small, tmp_path, NOISY, f"epsilon: {most + 0.01}")
    first = one.train()
    assert isinstance(one.train(lr=0.2), bytes) and isinstance(one.train(run="new", round=9), bytes)
    assert {one.train(lr=0.3), one.train(run="newer"), one.train(round=2, after=1)} == {"policy.epsilon"}
    assert one.train() == first and len(one.written) == 3
    assert isinstance(one.train(client="bob"), bytes)  # has a budget of its own
    shutil.rmtree(one.place.home / "runs")  # its memories are gone, and what was released is not
    one.node = Node()
    assert one.train(lr=0.4) == "policy.epsilon"


def test_noisy_steps_that_a_server_takes_back_count(small, tmp_path):
    """Two of 2 steps each at rate 1/3, whichever memory an order begins from."""
    one = One(small, tmp_path, OF_EXAMPLES, f"epsilon: {composed({(1.0, 1 / 3): 5}, 1e-5)}")
    one.train()
    assert one.reply["epsilon"] == pytest.approx(composed({(1.0, 1 / 3): 2}, 1e-5), rel=1e-5)
    assert isinstance(one.train(lr=0.2), bytes) and one.train(lr=0.3) == "policy.epsilon"
    assert [(line["noise"], line["rate"], line["times"]) for line in one.written] == [(1.0, 1 / 3, 2)] * 2


def test_an_answer_leaves_after_it_is_written_and_what_is_torn_or_damaged_is_noticed(small, tmp_path, monkeypatch):
    one = One(small, tmp_path, NOISY)
    first, path = one.train(), one.place.home / "ledger/ada/released.jsonl"

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(path.read_bytes() + data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "append_file", full)
        assert one.train(lr=0.2) == "disk"
    assert one.train() == first and len(one.written) == 1  # the torn line is cut off
    assert isinstance(one.train(lr=0.2), bytes) and len(one.written) == 2
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.parent.iterdir())
    path.write_text("{}\n")
    assert one.train(lr=0.3) == "failed"


def test_older_answers_are_deleted_and_counted_when_they_are_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "KEPT", 3)
    for number in range(9):
        own = Ledger(tmp_path, "ada")
        assert own.answer(f"o{number - 1}") == (({}, b"x\n\n%d" % (number - 1)) if number else None)
        own.write(f"o{number}", "r", "", {(1.0, 1.0): 1}, ({}, b"x\n\n%d" % number))
    assert [Ledger(tmp_path, "ada").answer(f"o{n}") is None for n in range(9)] == [True] * 6 + [False] * 3
    assert len([*(tmp_path / "ledger/ada").iterdir()]) == 4
    assert Ledger(tmp_path, "ada").released() == {(1.0, 1.0): 9}


def test_examples_are_hidden_over_a_network_as_in_one_process(small, tmp_path):
    """The same epsilon; the cards of the nodes count all that was released, also what the server has forgotten."""
    settings = tree(small, rounds=2, **OF_EXAMPLES)
    here = experiment.train(from_dict(settings), tmp_path / "here/run")
    link = NetworkInProcess(tmp_path, small, settings)
    said = io.StringIO()
    there = server.train(link.config, tmp_path / "run", link, reporter=Reporter(Console(file=said, soft_wrap=True)))
    assert "round 2/2: no loss is told, " in said.getvalue() and "no client trained" not in said.getvalue()
    spent = there["privacy"]
    assert spent == here["privacy"] and spent["epsilon"] == pytest.approx(composed({(1.0, 1 / 3): 4}, 1e-5), rel=1e-5)
    assert {line["epsilon"] for line in lines(tmp_path, "client")} == {
        line["epsilon"] for line in lines(tmp_path / "here", "client")
    }
    assert there["scores"]["clients"].keys() == set(CLIENTS)
    card = (tmp_path / "home-ada/adapters/run/ada/README.md").read_text()
    assert f"epsilon = {spent['epsilon']:.3g}" in card and "Example-level" in card


def test_a_node_that_only_trains_ends_a_run_without_scores(small, tmp_path):
    link = NetworkInProcess(tmp_path, small, tree(small, rounds=2, **NOISY))
    (tmp_path / "policy.yaml").write_text("epsilon: 50.0")
    link.places = {id: _with(place, tmp_path) for id, place in link.places.items()}
    done = server.train(link.config, tmp_path / "run", link)
    assert not done["scores"].get("clients") and "unfinished" not in done
    assert [line["arrived"] for line in lines(tmp_path, "round")] == [3, 3]
    assert {path.parent.name for path in tmp_path.glob("home-*/adapters/run/*/README.md")} == set(CLIENTS)


def _with(place: NodeSettings, folder: Path) -> NodeSettings:
    return NodeSettings(place.home, place.path, place.clients, policy=str(folder / "policy.yaml"))
