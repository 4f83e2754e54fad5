"""How much `init` proposes to train: it follows the data, and the comparison with `local` is at equal work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_fed.commands import init, known_base, labelled
from llm_fed.commands.budget import Budget, Workload
from llm_fed.federation.schedule import cohort_size

# As `init` had them when this was written: its own may follow a measurement.
BUDGET = Budget(passes=5, batch=4, steps=(4, 40), rounds=(5, 50), all_of=20, cohort=(10, 50))


def work(clients: int, examples: int) -> Workload:
    return BUDGET.work([examples] * clients)


@pytest.mark.parametrize(
    ("clients", "examples", "rounds", "steps", "cohort"),
    [
        (3, 14, 5, 4, 3),
        (5, 58, 10, 8, 5),
        (8, 216, 14, 20, 8),
        (50, 72, 50, 9, 10),
        (200, 10, 32, 4, 20),
        (1000, 36, 50, 5, 50),
        (1, 72_000, 50, 40, 1),
    ],
)
def test_of_federations_of_every_size(clients, examples, rounds, steps, cohort):
    """Training examples, of which a batch has four. Of 58: a pass has 14.5 steps, half of one is 8; five passes are
    72.5 steps, in 10 rounds."""
    found = work(clients, examples)
    assert (found.rounds, found.steps, found.cohort) == (rounds, steps, cohort)


def test_two_hundred_clients_of_fourteen_examples_are_not_drilled():
    assert init.BUDGET.work([14] * 200).passes < 15


sizes = st.lists(st.integers(1, 200_000), min_size=1, max_size=50).map(lambda few: few * 7)


@given(sizes, st.sampled_from([init.BUDGET, labelled.BUDGET]))
def test_within_limits(sizes, budget):
    found = budget.work(sizes)
    assert budget.rounds[0] <= found.rounds <= budget.rounds[1]
    assert budget.steps[0] <= found.steps <= budget.steps[1] and 1 <= found.cohort <= len(sizes)
    assert cohort_size(found.participation, len(sizes)) == found.cohort
    rounds, steps = found.alone()
    if found.cohort == found.clients:
        assert rounds * steps == found.of_a_client  # else "each with as many steps" in the file would be untrue
    assert found.of_a_client <= rounds * steps < found.of_a_client + rounds


def test_the_file_compares_at_equal_work():
    """Where some are asked in each round, `local` trains them all, in fewer rounds."""
    found = work(50, 72)
    rows = init.settings_of("fedlora", found, known_base.SLOW, {})["rows"]
    assert rows["fedlora"] == [] and "participation=1.0" in rows["local"]
    rounds, steps = found.alone()
    assert {f"rounds={rounds}", f"local.steps={steps}"} < set(rows["local"])
    assert math.isclose(rounds * steps, 50 * 9 * 10 / 50, rel_tol=0.1)
    rows = init.settings_of("fedlora", work(5, 72), known_base.SLOW, {})["rows"]
    assert rows == {"local": ["method=local"], "fedlora": []}
    assert init.settings_of("local", init.BUDGET.work([72]), known_base.SLOW, {})["rows"] == {}


def test_local_is_compared_with_methods_that_share_at_equal_work():
    """All take the file's own rounds and steps, whichever a command line says."""
    found = init.BUDGET.work([72] * 5, alone=True)
    rows = init.settings_of("local", found, known_base.SLOW, {})["rows"]
    assert rows == {"local": [], **{name: [f"method={name}"] for name in ("fedit", "fedlora", "fedalt")}}
