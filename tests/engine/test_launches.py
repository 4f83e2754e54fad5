"""What a step and an answer ask of a GPU, on a device that computes nothing: launches, and how often the host waits."""

import json

import pytest
import small_process
from torch.utils import backend_registration

MOST = 280  # launches of a step on the tiny base: how many exactly is torch's and transformers' to say


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, tuple[int, int]]:
    """By case launches and waits. An operation that mixes devices, or one whose result has as many rows as values hold,
    ends the process."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices that are written in Python, so launches are not counted")
    path = tmp_path_factory.mktemp("counted") / "counts.json"
    process = small_process.CONTEXT.Process(target=small_process.call, args=("pretended_steps", "write", str(path)))
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


def test_no_step_waits_for_the_device(counted):
    waits = [waits for name, (_, waits) in counted.items() if not name.startswith(("answers", "scores"))]
    assert waits == [0] * 8


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
