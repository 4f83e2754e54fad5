"""Clients of a network whose data go away and come back, or that lack training or test examples."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from network import NETWORK, NetworkInProcess, lines, tree
from rich.console import Console
from small_run import CLIENTS, Small
from uneven import WHOLE, write

from llm_fed.experiment import run as experiment
from llm_fed.network import node, roster, server
from llm_fed.network.node import Node
from llm_fed.network.refusals import Refused, told
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict

pytestmark = pytest.mark.usefixtures("quick")
PAIR = (("ada", "bob"), ("cyd",))
HOMES = {**NETWORK, "clients": ["ada@ada", "bob@ada", "cyd@cyd"], "deadline": 30.0, "patience": 60.0}


class Moving(NetworkInProcess):
    """Before the orders of some rounds, data at the first node are moved away or back, and its worker starts again."""

    def __init__(self, *words: Any, away: dict[int, str | None], **options: Any):
        super().__init__(*words, **options)
        self.away, self.place = away, Path(self.places[1].path)

    def _carry_out(self, to: int, message: Any, content: bytes) -> str:
        rounds = [order["round"] for order in message.get("orders", ()) if order["kind"] == "train"]
        if to == 1 and rounds and rounds[0] in self.away:
            moved, aside = self.away.pop(rounds[0]), self.place.with_name("aside")
            if moved == "half a file":
                (self.place / "bob").mkdir()
                (self.place / "bob/train.jsonl").write_text('{"instruction": "w2')
            elif moved is None:
                shutil.copytree(aside, self.place, dirs_exist_ok=True)
            else:
                shutil.copytree(self.place, aside)
                shutil.rmtree(self.place / moved)
                self.workers[1] = Node()
        return super()._carry_out(to, message, content)


def failures(folder: Path) -> list[tuple[int, str]]:
    return [(line["round"], line["client"]) for line in lines(folder, "event") if line["event"] == "client failed"]


@pytest.mark.parametrize(
    ("moved", "failed"), [("bob", ["bob"]), (".", ["ada", "bob"])], ids=["one client's", "the whole folder"]
)
def test_data_that_go_away_cost_their_clients_rounds_and_nothing_else(small, tmp_path, monkeypatch, moved, failed):
    """In rounds 2 and 3 of 5; then they are back, and their clients continue from the state of round 1."""
    monkeypatch.setattr(node, "_AGAIN", 0.0)
    settings = tree(small, rounds=5, method={"name": "fedalt"}, network=HOMES, eval={"every": 0})
    link = Moving(tmp_path, small, settings, nodes=PAIR, away={2: moved, 4: None})
    done = server.train(link.config, tmp_path / "run", link)
    assert failures(tmp_path) == [(round, client) for round in (2, 3) for client in failed]
    if moved == "bob":
        assert {line["reason"] for line in lines(tmp_path, "event")} == {told(Refused("client", ""))["error"]}
    answered = {client: [] for client in CLIENTS}
    for line in lines(tmp_path, "client"):
        answered[line["client"]].append(line["round"])
    assert answered == {client: [1, 4, 5] if client in failed else [1, 2, 3, 4, 5] for client in CLIENTS}
    afters = [order["after"] for order in link.orders if order["kind"] == "train" and order["client"] == "bob"]
    assert afters == [0, 1, 1, 1, 4]
    assert "unfinished" not in done and set(done["scores"]["clients"]) == set(CLIENTS)


def test_data_that_are_half_back_are_no_matter_for_the_other_clients_of_the_machine(small, tmp_path, monkeypatch):
    monkeypatch.setattr(node, "_AGAIN", 0.0)
    settings = tree(small, rounds=4, network=HOMES, eval={"every": 0})
    link = Moving(tmp_path, small, settings, nodes=PAIR, away={2: "bob", 3: "half a file", 4: None})
    assert "unfinished" not in server.train(link.config, tmp_path / "run", link)
    assert failures(tmp_path) == [(2, "bob"), (3, "bob")]


def test_data_that_are_not_looked_for_again_at_once(small, tmp_path):
    """As reading them may take long: a minute passes first."""
    settings = tree(small, rounds=4, network=HOMES, eval={"every": 0})
    link = Moving(tmp_path, small, settings, nodes=PAIR, away={2: "bob", 3: None})
    assert server.train(link.config, tmp_path / "run", link)["unfinished"] == ["bob"]
    assert failures(tmp_path) == [(2, "bob"), (3, "bob"), (4, "bob")]


def test_a_node_that_cannot_take_part_yet_is_asked_again(small, tmp_path, monkeypatch):
    """Why is said once."""
    monkeypatch.setattr(roster, "_AGAIN", 0.0)
    settings = tree(small, rounds=1, network=HOMES)
    link, seen = NetworkInProcess(tmp_path, small, settings, nodes=PAIR), []
    place = Path(link.places[1].path)
    place.rename(place.with_name("aside"))

    def late(order: Any, reply: Any) -> Any:
        if order["kind"] == "hello" and "error" in reply.content:
            seen.append(reply.error)
            if len(seen) == 3:
                place.with_name("aside").rename(place)
        return reply

    link._spoil = late
    said: list[str] = []
    reporter = Reporter(Console(quiet=True))
    monkeypatch.setattr(reporter, "note", said.append)
    done = server.train(link.config, tmp_path / "run", link, reporter=reporter)
    assert len(seen) == 3 and "the node could not do it (failed)" in seen[0]
    assert sum("node 1 cannot take part" in text for text in said) == 1
    assert set(done["scores"]["clients"]) == set(CLIENTS)


def test_clients_of_one_node_need_not_all_have_data(small, tmp_path):
    """Those that the operator lists at a node, too."""
    link = NetworkInProcess(tmp_path, small, tree(small), nodes=PAIR)
    shutil.rmtree(Path(link.places[1].path) / "bob")
    place = node.NodeSettings(link.places[1].home, link.places[1].path, clients=("ada", "bob"))
    said, _ = Node().answer(place, link._text, {"kind": "hello", "protocol": 2}, b"")
    assert (said.get("clients"), said.get("idle")) == ({"ada": 6}, ["bob"]), said


def uneven(small: Small, folder: Path, clients: dict[str, Any], **changes: Any) -> tuple[Any, Any, list[str]]:
    """The summaries of one process and of a network with each client at a node of its own, and what its server said."""
    data = write(folder / "data", clients)
    settings = tree(small, rounds=2, **changes)
    settings["task"]["path"] = str(data)
    settings["network"] = {**NETWORK, "clients": [name for name, sizes in clients.items() if sizes.get("train")]}
    here = experiment.train(from_dict(settings), folder / "here")
    link = NetworkInProcess(folder, Small(small.base, data), settings, nodes=[(name,) for name in clients])
    said: list[str] = []
    reporter = Reporter(Console(quiet=True))
    reporter.note = said.append  # type: ignore[method-assign]
    return here, server.train(link.config, folder / "run", link, reporter=reporter), said


def test_who_has_no_test_example_trains_and_is_not_scored(small, tmp_path):
    clients = {"ada": WHOLE, "bob": {"train": 1}, "cyd": WHOLE}
    here, there, said = uneven(small, tmp_path, clients)
    assert there["scores"]["unscored"] == ["bob"] == here["scores"]["unscored"]
    assert there["scores"]["clients"] == here["scores"]["clients"] and there["scores"]["mean"] == here["scores"]["mean"]
    assert sum("these clients have no test example" in text for text in said) == 1
    assert "It has none, as" in (tmp_path / "home-bob/adapters/run/bob/README.md").read_text()


def test_who_has_no_training_example_takes_no_part(small, tmp_path):
    """In one process it is scored with the model for all; a network waits for nobody who has nothing to train on."""
    here, there, said = uneven(small, tmp_path, {"ada": WHOLE, "bob": WHOLE, "eve": {"test": 2}})
    assert set(there["scores"]["clients"]) == {"ada", "bob"} and set(here["scores"]["clients"]) == {"ada", "bob", "eve"}
    assert any("node 3 cannot take part" in text for text in said)
    assert json.loads((tmp_path / "run/network.json").read_text())["clients"] == ["ada", "bob"]
