"""The benchmark beside TRL, Flower and plain loops: everybody has the same work, and what its tables say."""

from __future__ import annotations

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


def test_the_plan(folder):
    """Clients have 16 examples each; a step has three of them, and each round asks two clients."""
    work = json.loads((folder / "work.json").read_text())
    for clients in work["rounds"]:
        assert [len(client["batches"]) for client in clients] == [2, 2]
        assert all(len(batch) == 3 for client in clients for batch in client["batches"])
        assert [client["num_examples"] for client in clients] == [16, 16]
        for ids, labels in (example for client in clients for batch in client["batches"] for example in batch):
            assert 0 < sum(label >= 0 for label in labels) < len(ids) == len(labels)
            assert all(label in (-100, id) for id, label in zip(ids, labels, strict=True))


def test_more_clients_than_the_data_has_divide_it(scripts):
    words = scripts.peers.settings(Namespace(**{**vars(SETTINGS), "clients": 30, "asked": 3}))
    experiment = scripts.peers.built(words)
    assert (len(experiment.clients), experiment.schedule.cohort_size) == (30, 3)


def test_the_mean_is_weighted_by_examples(scripts):
    """(1 * 1 + 2 * 4) / 3 = 3."""
    adapters = [{"a": torch.tensor([1.0])}, {"a": torch.tensor([4.0])}]
    found = scripts.peer_loops.mean(adapters, [{"num_examples": 10}, {"num_examples": 20}])
    torch.testing.assert_close(found["a"], torch.tensor([3.0]))


def test_how_far_results_lie_apart(scripts):
    """From 0, training went to (3, 4); another result is (3, 3.5): 0.5 of 5 away."""
    start, one, other = ({"a": torch.tensor([a]), "b": torch.tensor([b])} for a, b in ((0.0, 0), (3, 3.5), (3, 4)))
    assert scripts.peers.apart(one, other, start) == pytest.approx(0.1)


def test_the_table(scripts):
    found = {
        "ours": scripts.peers.Found([1.0, 2.0, 4.0], [700, 700, 700], 512.4),
        "trl": scripts.peers.Found([5.0, 5.0, 5.0], [700, 700, 700], 1600.0, 2e-5),
    }
    assert scripts.peers.table(found).splitlines()[2:] == [
        "| ours | 2.00 | 1.00-4.00 | 1.00 | 300 | 512 |  |",
        "| trl | 5.00 | 5.00-5.00 | 2.50 | 140 | 1,600 | 2e-05 |",
    ]


def test_a_peer_that_is_not_installed_is_left_out_and_said(scripts, monkeypatch, capsys):
    monkeypatch.setattr(scripts.peers, "NEEDED", {"trl": ("torch", "no_such_package")})
    assert scripts.peers.installed(["ours", "trl", "floor"]) == ["ours", "floor"]
    assert capsys.readouterr().out == "trl is left out: no_such_package is not installed (see --help)\n"


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


def test_memory_is_that_of_a_process_and_its_children(scripts, monkeypatch, tmp_path):
    """The process fills 100 MiB and its child another 200."""
    child = "kept = bytearray(b'x') * (200 << 20); time.sleep(0.5)"
    loops = tmp_path / "loops.py"
    loops.write_text(f"""import json, subprocess, sys
kept = bytearray(b"x") * (100 << 20)
subprocess.run([sys.executable, "-c", "import time; " + {child!r}], check=True)
print(json.dumps({{"seconds": [1.0], "tokens": [7]}}))""")
    monkeypatch.setattr(scripts.peers, "LOOPS", loops)
    said, peak = scripts.peers.measured("peft", tmp_path)
    assert said == {"seconds": [1.0], "tokens": [7]} and 300 < peak < 360


def test_a_process_that_fails_is_shown(scripts, monkeypatch, tmp_path):
    loops = tmp_path / "loops.py"
    loops.write_text("raise ValueError('no memory')")
    monkeypatch.setattr(scripts.peers, "LOOPS", loops)
    with pytest.raises(SystemExit, match=r"(?s)ValueError: no memory\npeers.py: peft ended with exit code 1"):
        scripts.peers.measured("peft", tmp_path)


def test_what_a_common_prefix_would_leave_out(scripts):
    """Three prompts of 4, 3 and 3 tokens begin with the same two: two of three times two of ten tokens; a client with
    one prompt repeats nothing."""
    assert scripts.generation.repeated([[[7, 8, 1, 2], [7, 8, 3], [7, 8, 1]]]) == pytest.approx(4 / 10)
    assert scripts.generation.repeated([[[7, 8, 1, 2]]]) == 0


def test_answers_are_those_of_stock_peft(scripts):
    words = [f"base.name={scripts.peers.TINY_BASE}", "base.dtype=float32", "device=cpu", "task.name=planted",
             "task.clients=2", "eval.batch_size=3", "eval.max_new_tokens=4"]  # fmt: skip
    bench = scripts.generation.Bench(words, 4)
    texts, scores = bench.texts(), bench.scores()
    assert texts == bench.stock_texts() and len(set(map(tuple, texts.values()))) == 2
    assert {id: len(its) for id, its in scores.items()} == {id: 4 for id in texts}
    for id, its in bench.stock_scores().items():
        torch.testing.assert_close(torch.tensor(scores[id]), torch.tensor(its), atol=1e-4, rtol=1e-4)
