"""The script that measures attacks: what liars send and train on, and its table."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from llm_fed import tasks
from llm_fed.settings.config import TaskConfig
from llm_fed.state import State

FOLDER = Path(__file__).parents[2] / "scripts" / "studies"


@pytest.fixture
def attacks(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("attacks")


def state(*numbers: float) -> State:
    return State.of({"a": torch.tensor(numbers)})


def test_what_liars_send(attacks):
    """Honest numbers 1, 3 and 2, 6: means 2 and 4, standard deviations sqrt(2) and 2 sqrt(2)."""
    honest, own = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), state(3.0, 4.0)

    def lie(attack: str, own: State = own) -> State:
        return attacks.Lying(["a"], attack, 0, {}, None, None)._lie("a", own, honest, 1)

    assert lie("flip").row.tolist() == [-3, -4] and lie("flip9").row.tolist() == [-27, -36]
    assert lie("none") is own and lie("poison") is own
    assert lie("noise").norm() == pytest.approx(45) and lie("noise").equal(lie("noise"))
    root = 2**0.5
    assert lie("collude").row.tolist() == pytest.approx([2 - 1.5 * root, 4 - 3 * root])
    again = attacks.Lying(["a"], "replay", 0, {}, None, None)
    assert again._lie("a", own, honest, 1) is own and again._lie("a", state(9.0, 9.0), honest, 2) is own


def test_who_lies_and_what_it_trains_on(attacks):
    task = tasks.load(TaskConfig(name="planted"), 0, 0)
    liars = attacks.liars_of(task, 0.25, 3)
    assert len(liars) == 3 and liars == attacks.liars_of(task, 0.25, 3) != attacks.liars_of(task, 0.25, 4)
    assert liars != sorted(task.clients)[:3]
    client = task.clients[liars[0]]
    wrong = attacks.poisoned(client)
    assert wrong.test == client.test and len(wrong.train) == len(client.train)
    for false, true in zip(wrong.train, client.train, strict=True):
        assert false.prompt == true.prompt and false.answers != true.answers and false.answers[0] in true.options
