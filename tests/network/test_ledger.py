"""What a client has released stays in its node's ledger, whatever a server forgets, repeats or goes back to; and what a
node does whose data go away and come back, or lack training or test examples."""

import errno
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import growing
import pytest
import yaml
from growing import key
from network import NETWORK, NetworkInProcess, lines, tree, work
from rich.console import Console
from small_run import CLIENTS, Small
from uneven import WHOLE, write

from llm_fed.bench import build
from llm_fed.experiment import run as experiment
from llm_fed.federation.privacy import composed
from llm_fed.network import ledger, node, roster, server
from llm_fed.network.ledger import Ledger
from llm_fed.network.node import Node, NodeSettings
from llm_fed.network.refusals import Refused, told
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import as_dict, from_dict
from llm_fed.state.wire import pack
from llm_fed.tasks.record import TEST, Record

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
    link.places = {id: replace(place, policy=str(tmp_path / "policy.yaml")) for id, place in link.places.items()}
    done = server.train(link.config, tmp_path / "run", link)
    assert not done["scores"].get("clients") and "unfinished" not in done
    assert [line["arrived"] for line in lines(tmp_path, "round")] == [3, 3]
    assert {path.parent.name for path in tmp_path.glob("home-*/adapters/run/*/README.md")} == set(CLIENTS)


# Data that go away and come back


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
def test_data_that_go_away_cost_their_clients_rounds_and_nothing_else(small, tmp_path, moved, failed):
    """In rounds 2 and 3 of 5; then they are back, and their clients continue from the state of round 1."""
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


def test_data_that_are_half_back_are_no_matter_for_the_other_clients_of_the_machine(small, tmp_path):
    settings = tree(small, rounds=4, network=HOMES, eval={"every": 0})
    link = Moving(tmp_path, small, settings, nodes=PAIR, away={2: "bob", 3: "half a file", 4: None})
    assert "unfinished" not in server.train(link.config, tmp_path / "run", link)
    assert failures(tmp_path) == [(2, "bob"), (3, "bob")]


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


# What a node keeps of its rows


def rows(numbers: range) -> str:
    return "".join(json.dumps({"instruction": f"w{n} w20", "output": "w4 w5"}) + "\n" for n in numbers)


def test_a_node_keeps_its_rows_where_they_were(small, tmp_path, capsys):
    """Its worker ends, its data change, and the same run goes on; another run divides them anew."""
    settings = small.tree(rounds=2, task={"validation": 0.0}, network={"clients": ["ada"]})
    link = NetworkInProcess(tmp_path, small, settings, nodes=[["ada"]])
    path = Path(link.places[1].path or "")
    shutil.rmtree(path)
    path.mkdir()
    (path / "ada.jsonl").write_text(rows(range(20)))

    def greeted(token: str) -> set[tuple[str, ...]]:
        with growing.built() as built:
            order = {"kind": "evaluate", "run": token, "client": "ada", "after": 0, "split": "test"}
            reply, _ = Node().answer(link.places[1], link._text, work(order), pack(None))
        assert "error" not in reply, reply
        return built[0].held

    first = greeted("one")
    assert first and greeted("one") == first and "have changed" not in capsys.readouterr().out
    kept = [json.loads(line) for line in (path / "ada.jsonl").read_text().splitlines()]
    left = [row for row in kept if key(*row.values()) not in first]
    (path / "ada.jsonl").write_text("".join(json.dumps(row) + "\n" for row in left))
    assert greeted("one") == set()
    assert f"the data have changed: {len(first)} rows are gone" in capsys.readouterr().out
    assert greeted("two") and not greeted("one")
    mask = Record.from_json(json.loads((link.places[1].home / "splits/one.json").read_text()))
    assert (mask.splits & TEST > 0).sum() == len(first)  # they may come back


def test_an_order_to_train_writes_the_record_first(small, tmp_path):
    settings = small.tree(rounds=1, network={"clients": ["ada"]})
    link = NetworkInProcess(tmp_path, small, settings, nodes=[["ada"]])
    order = {"kind": "train", "run": "one", "client": "ada", "round": 1, "lr": 0.1, "after": 0, "kept": []}
    link.workers[1].answer(link.places[1], link._text, work(order, content=b"no message"), pack(None))
    assert (link.places[1].home / "splits/one.json").is_file()
