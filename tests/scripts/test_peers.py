"""The benchmark beside TRL, Flower and plain loops: everybody has the same work, and what its tables say."""

import importlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

SETTINGS = Namespace(
    base=None, data=None, clients=3, asked=2, steps=2, rounds=1, batch_size=3, lr=1e-3, threads=1, actors=1
)


@pytest.fixture(scope="module")
def scripts() -> Any:
    folder = str(Path(__file__).parents[2] / "scripts" / "bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield Namespace(**{name: importlib.import_module(name) for name in ("peers", "peer_loops", "generation")})


@pytest.fixture(scope="module")
def folder(scripts, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("work")
    scripts.peers.write_work(place, SETTINGS)
    return place


def test_all_read_the_planned_tokens_and_end_alike(scripts, folder):
    """Two rounds of two of three clients: llm_fed's loop and a plain one are given the same start and examples."""
    start, ends = load_file(folder / "start.safetensors"), {}
    for peer in ("ours", "peft", "floor"):
        work = scripts.peer_loops.Work(folder)
        ends[peer] = scripts.peer_loops.PEERS[peer](work)
        assert work.tokens == [scripts.peers.tokens_of(clients) for clients in work.rounds], peer
        assert len(work.seconds) == len(work.rounds) == 2
    assert scripts.peers.apart(ends["peft"], ends["ours"], start) < 1e-3


def test_the_table(scripts):
    found = {
        "ours": scripts.peers.Found([1.0, 2.0, 4.0], [700, 700, 700], 512.4),
        "trl": scripts.peers.Found([5.0, 5.0, 5.0], [700, 700, 700], 1600.0, 2e-5),
    }
    assert scripts.peers.table(found).splitlines()[2:] == [
        "| ours | 2.00 | 1.00-4.00 | 1.00 | 300 | 512 |  |",
        "| trl | 5.00 | 5.00-5.00 | 2.50 | 140 | 1,600 | 2e-05 |",
    ]


def test_a_peer_that_does_other_work_ends_the_benchmark(scripts, folder, monkeypatch, tmp_path):
    """The one reads too few tokens; the other ends half as far from the start as the first."""
    rounds = json.loads((folder / "work.json").read_text())["rounds"]
    tokens = [scripts.peers.tokens_of(clients) for clients in rounds]
    said = {"ours": (tokens, 2.0), "peft": (tokens, 1.0), "trl": ([1, 1], 2.0)}

    def measured(peer: str, place: Path) -> tuple[dict[str, Any], float]:
        start = load_file(place / "start.safetensors")
        save_file({name: value + said[peer][1] for name, value in start.items()}, place / f"{peer}.safetensors")
        return {"seconds": [1.0, 1.0], "tokens": said[peer][0]}, 1.0

    monkeypatch.setattr(scripts.peers, "measured", measured)
    given = Namespace(**vars(SETTINGS), repeats=1)
    with pytest.raises(SystemExit, match=r"trl read \[1, 1\] tokens, and planned were \[\d+, \d+\]"):
        scripts.peers.compare(given, ["ours", "trl"], tmp_path)
    with pytest.raises(SystemExit, match=r"peft ends 0\.5 of the way from what ours ends with"):
        scripts.peers.compare(given, ["ours", "peft"], tmp_path)


def test_answers_are_those_of_stock_peft(scripts):
    words = [f"base.name={scripts.peers.TINY_BASE}", "base.dtype=float32", "device=cpu", "task.name=planted",
             "task.clients=2", "eval.batch_size=3", "eval.max_new_tokens=4"]  # fmt: skip
    bench = scripts.generation.Bench(words, 4)
    texts, scores = bench.texts(), bench.scores()
    assert texts == bench.stock_texts() and len(set(map(tuple, texts.values()))) == 2
    assert {id: len(its) for id, its in scores.items()} == {id: 4 for id in texts}
    for id, its in bench.stock_scores().items():
        torch.testing.assert_close(torch.tensor(scores[id]), torch.tensor(its), atol=1e-4, rtol=1e-4)
