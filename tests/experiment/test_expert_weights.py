"""How much each expert counts, as a finished run says it: for which methods, of which clients, and that it is true."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from small_run import CLIENTS, SIZES

from llm_fed.commands.evaluate import reopen
from llm_fed.experiment import finish
from llm_fed.experiment import run as experiment
from llm_fed.methods.ifca import IFCA
from llm_fed.runs.reading import read_config
from llm_fed.runs.records import read_records, timed_rounds
from llm_fed.settings.configfile import from_dict


@pytest.fixture(autouse=True)
def no_reports(monkeypatch):
    monkeypatch.setattr(finish, "write_report", lambda folder: None)


def told(tree: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    tree["eval"] = {**tree["eval"], "cross": False}
    experiment.train(from_dict(tree), folder)
    return read_records(folder / "experts.jsonl")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("pfedmoe", ["global", "local"]),
        ("feddpa", ["global", "local"]),
        ("fedalt", ["own", "rest"]),
        ("fedem", ["expert0", "expert1"]),
    ],
)
def test_adapters_tell_of_every_client(small, tmp_path, name, names):
    method = {"name": name} | ({"num_models": 2} if name == "fedem" else {})
    lines = told(small.tree(rounds=2, method=method, local={"steps": 4, "lr": 0.05}), tmp_path / "run")
    assert [line["client"] for line in lines] == list(CLIENTS)
    for line in lines:
        assert list(line["mean"]) == list(line["std"]) == names and line["examples"] == SIZES["test"]
        assert sum(line["mean"].values()) == pytest.approx(1, abs=1e-5)
    assert any(abs(mean - 0.5) > 1e-4 for line in lines for mean in line["mean"].values())


def test_the_gate_of_whole_models_is_what_it_gives_the_test_pictures(tmp_path):
    pictures, folder = tiny_images.npz(tmp_path / "small.npz"), tmp_path / "run"
    lines = told(tiny_images.tree(pictures, rounds=2, method={"name": "fedmoe"}), folder)
    built, states = reopen(folder, read_config(folder))
    for line in lines:
        site = built.scored[line["client"]]
        outcome = built.runtime.run({site.id: site.answers(states[site.id], site.data.queries["test"])})[site.id]
        expected = outcome.gate.double()
        assert list(line["mean"]) == ["own", "small"]
        assert torch.tensor(list(line["mean"].values())).double() == pytest.approx(expected.mean(0), abs=1e-5)
        assert torch.tensor(list(line["std"].values())).double() == pytest.approx(
            expected.std(0, correction=0), abs=1e-5
        )


def test_a_mixture_is_the_same_for_all_pictures(tmp_path):
    pictures, folder = tiny_images.npz(tmp_path / "small.npz"), tmp_path / "run"
    lines = told(tiny_images.tree(pictures, rounds=2, method={"name": "fedem", "num_models": 3}), folder)
    _, states = reopen(folder, read_config(folder))
    for line in lines:
        weights = states[line["client"]]["weights"].tolist()
        assert list(line["mean"].values()) == pytest.approx(weights, abs=1e-5) and line["std"] is None


def test_only_so_many_clients_and_examples(small, tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "MAX_CLIENTS", 2)
    monkeypatch.setattr(finish, "MAX_EXAMPLES", 1)
    lines = told(small.tree(rounds=1, method={"name": "pfedmoe"}), tmp_path / "run")
    assert [(line["client"], line["examples"]) for line in lines] == [("ada", 1), ("bob", 1)]


def test_a_method_without_experts_tells_nothing(small, tmp_path):
    assert not told(small.tree(rounds=1, method={"name": "fedit"}), tmp_path / "run")
    assert not (tmp_path / "run/experts.jsonl").exists()


def test_a_merge_says_when_it_was_made(small, tmp_path):
    told(small.tree(rounds=1, method={"name": "mean"}), tmp_path / "run")
    (line,) = timed_rounds(tmp_path / "run")
    assert list(line["parts"]) == ["merge"] and line["ended"].startswith("20") and line["ended"].endswith("+00:00")


@pytest.mark.parametrize("export", ["all", "none"])
def test_each_personal_model_is_made_once_at_the_end(small, tmp_path, monkeypatch, export):
    """IFCA looks at every training example for it. It is made once before for the validation score of the round."""
    made: Counter[str] = Counter()
    plain = IFCA.personalize

    async def personalize(self, client, message):
        made[client.id] += 1
        return await plain(self, client, message)

    monkeypatch.setattr(IFCA, "personalize", personalize)
    method = {"name": "ifca", "num_models": 2}
    told(small.tree(rounds=1, method=method, export={"clients": export}), tmp_path / "run")
    assert made == dict.fromkeys(CLIENTS, 2)
