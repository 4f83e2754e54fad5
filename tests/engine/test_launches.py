"""What a step and an answer ask of a GPU, on a device that computes nothing: launches, and how often the host waits."""

import json
from pathlib import Path

import pytest
import small_process
from torch.utils import backend_registration

MOST = 280  # launches of a step on the tiny base: how many exactly is torch's and transformers' to say


QUICK = [
    "one client", "three clients", "one client, clipped", "three clients, clipped", "private", "teachers",
    "captured, router", "as by default", "answers of unequal prompts", "answers, captured",
    "scores in one pass", "scores in three passes", "scores of three options", "scores of twelve options",
]  # fmt: skip


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, tuple[int, int]]:
    return counts(tmp_path_factory.mktemp("counted") / "quick.json", *QUICK)


def counts(path: Path, *cases: str) -> dict[str, tuple[int, int]]:
    """By case launches and waits; of all cases if none is named. An operation that mixes devices, or one whose result
    has as many rows as values hold, ends the process."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices that are written in Python, so launches are not counted")
    process = small_process.CONTEXT.Process(
        target=small_process.call, args=("pretended_steps", "write", str(path), *cases)
    )
    process.start()
    process.join()
    said = path.read_text() if path.exists() else "it ended without a word"
    assert process.exitcode == 0, said
    return {name: (launches, waits) for name, (launches, waits) in json.loads(said).items()}


def test_further_clients_cost_no_launches(counted):
    """In one micro-batch, for which the host asks for one copy. Clipping multiplies each client's gradient by a factor
    of its own."""
    one, three = counted["one client"][0], counted["three clients"][0]
    assert three == one <= MOST
    assert 0 < counted["one client, clipped"][0] - one <= 10
    assert 0 < counted["three clients, clipped"][0] - three <= 12


def waits_of_steps(counted: dict[str, tuple[int, int]]) -> list[int]:
    return [waits for name, (_, waits) in counted.items() if not name.startswith(("answers", "scores"))]


def test_no_step_waits_for_the_device(counted):
    assert waits_of_steps(counted) == [0] * 8


@pytest.mark.slow
def test_no_step_of_any_kind_waits_for_the_device(tmp_path):
    every = counts(tmp_path / "all.json")
    assert set(QUICK) < set(every) and waits_of_steps(every) == [0] * 19
    assert every["answers of equal prompts"][1] == 3 * 2


def test_an_answer_waits_once_for_each_token(counted):
    """Each of three rows is read in each of two steps."""
    names = ("answers of unequal prompts", "answers, captured")
    assert [counted[name][1] for name in names] == [3 * 2] * 2


def test_further_options_cost_no_launches(counted):
    """Of one batch, whose scores are read at its end."""
    assert counted["scores of three options"][0] == counted["scores of twelve options"][0]
    assert (counted["scores of three options"][1], counted["scores of twelve options"][1]) == (3, 12)


def test_losses_wait_once_for_all_passes(counted):
    """The one wait is the copy of all losses to the host."""
    assert counted["scores in three passes"][0] > 2 * counted["scores in one pass"][0]
    assert counted["scores in three passes"][1] == counted["scores in one pass"][1] == 1
