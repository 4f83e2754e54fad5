"""What a node keeps of its rows for each run, whose data never leave it."""

import json
import shutil
from pathlib import Path

import growing_runs
from growing import key
from network import NetworkInProcess, work

from llm_fed.network.node import Node
from llm_fed.state.wire import pack
from llm_fed.tasks.record import TEST, Record


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
        with growing_runs.built() as built:
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
