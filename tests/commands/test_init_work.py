"""How much `init` proposes to train: it follows the data, and the comparison with `local` is at equal work."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_fed.commands import init, known_base, pictured
from llm_fed.commands.budget import Budget, Workload
from llm_fed.federation.schedule import cohort_size

# As `init` had them when this was written: its own may follow a measurement.
BUDGET = Budget(passes=5, own=2, batch=4, steps=(4, 40), rounds=(5, 50), all_of=20, cohort=(10, 50), most_own=100)


def work(clients: int, examples: int) -> Workload:
    return BUDGET.work([examples] * clients, own_steps=True)


@pytest.mark.parametrize(
    ("clients", "examples", "rounds", "steps", "cohort", "own_steps"),
    [
        (3, 14, 5, 4, 3, 8),
        (5, 58, 6, 8, 5, 32),
        (8, 216, 9, 20, 8, 100),
        (50, 72, 30, 9, 10, 36),
        (200, 10, 19, 4, 20, 4),
        (1000, 36, 50, 5, 50, 18),
        (1, 72_000, 50, 40, 1, 80),
    ],
)
def test_of_federations_of_every_size(clients, examples, rounds, steps, cohort, own_steps):
    """Training examples, of which a batch has four. Of 58: a pass has 14.5 steps, half of one is 8; three passes are
    43.5 steps, in 6 rounds; two passes of its own are 29, and with 32 it takes the steps of ten rounds in all."""
    found = work(clients, examples)
    assert (found.rounds, found.steps, found.cohort, found.own_steps) == (rounds, steps, cohort, own_steps)


def test_two_hundred_clients_of_fourteen_examples_are_not_drilled():
    assert init.BUDGET.work([14] * 200, own_steps=True).passes < 15


sizes = st.lists(st.integers(1, 200_000), min_size=1, max_size=50).map(lambda few: few * 7)


@given(sizes, st.booleans(), st.sampled_from([init.BUDGET, pictured.BUDGET]))
def test_within_limits(sizes, own_steps, budget):
    found = budget.work(sizes, own_steps=own_steps)
    assert budget.rounds[0] <= found.rounds <= budget.rounds[1]
    assert budget.steps[0] <= found.steps <= budget.steps[1] and 1 <= found.cohort <= len(sizes)
    assert found.own_steps <= budget.most_own and (found.own_steps > 0) == own_steps
    assert cohort_size(found.participation, len(sizes)) == found.cohort
    rounds, steps = found.alone()
    if own_steps or found.cohort == found.clients:
        assert rounds * steps == found.of_a_client  # else "each with as many steps" in the file would be untrue
    assert found.of_a_client <= rounds * steps < found.of_a_client + rounds


def test_the_file_compares_at_equal_work():
    found = work(50, 72)
    settings = init.settings_of("fedlora", found, known_base.SLOW, {})
    assert settings["rows"]["fedlora"] == [] and "participation=1.0" in settings["rows"]["local"]
    rounds, steps = found.alone()
    assert {f"rounds={rounds}", f"local.steps={steps}"} < set(settings["rows"]["local"])
    assert math.isclose(rounds * steps, 30 * 9 * 10 / 50 + 36, rel_tol=0.1)
    assert init.settings_of("local", init.BUDGET.work([72], own_steps=False), known_base.SLOW, {})["rows"] == {}


def test_local_is_compared_with_methods_that_share_at_equal_work():
    found = init.BUDGET.work([72] * 5, own_steps=False, alone=True)
    rows = init.settings_of("local", found, known_base.SLOW, {})["rows"]
    assert [*rows] == ["local", "fedlora", "fedalt"] and rows["local"] == [] and rows["fedalt"] == ["method=fedalt"]
    words = dict(word.split("=") for word in rows["fedlora"])
    shared, own = int(words["rounds"]) * found.steps, int(words["method.personal_steps"])
    assert shared + own == found.rounds * found.steps and own >= shared
