"""The script that shows a partition: its table, its counts, circles and heat maps, on pictures that clients divide."""

import csv
import importlib
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiny_images

from llm_fed import tasks
from llm_fed.settings import configfile


def held(pictures) -> Counter[str]:
    return Counter(picture.group for picture in pictures)


@pytest.fixture
def config(tmp_path) -> Path:
    """A configuration of a task of 36 + 18 pictures of four classes."""
    path = tiny_images.npz(tmp_path / "data.npz")
    (tmp_path / "run.yaml").write_text(f"task: {{name: images, path: {path}, validation: 0.0}}")
    return tmp_path / "run.yaml"


PATHOLOGICAL = [f"task.partition.{word}" for word in ("kind=pathological", "clients=4", "classes=2", "test=0.5")]


@pytest.fixture
def script(monkeypatch, config):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "figures"))
    module = importlib.import_module("partition")

    def call(*words: str, out: str = "held.png") -> list[dict[str, str]]:
        """The rows of its table of counts."""
        monkeypatch.setattr(sys, "argv", ["partition", str(config), *words, "--out", str(config.parent / out)])
        module.main()
        with open(config.parent / "held.csv", newline="") as file:
            return list(csv.DictReader(file))

    call.module = module
    return call


def test_the_script_counts_and_draws_what_clients_hold(script, config, capsys):
    rows = script(*PATHOLOGICAL)
    clients = tasks.load(configfile.load(config, PATHOLOGICAL).task, 0).clients
    found = {(row["client"], row["label"]): (int(row["train"]), int(row["test"])) for row in rows}
    assert found == {
        (name, label): (held(client.train)[label], held(client.test)[label])
        for name, client in clients.items() for label in held(client.train + client.test)
    }  # fmt: skip
    assert any(train == 0 for train, _ in found.values())  # a label that the client is only tested on
    shown = capsys.readouterr().out
    assert "4 clients, 4 labels" in shown
    sizes = [len(client.train) for client in clients.values()]
    line = next(line for line in shown.splitlines() if "train examples" in line)
    assert [float(word) for word in line.split() if word[0].isdigit()] == [min(sizes), np.median(sizes), max(sizes)]
    assert (config.parent / "held.png").stat().st_size > 1000
