"""How much `init` proposes to train: it follows the data, and the comparison with `local` is at equal work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_fed.commands import init, known_base
from llm_fed.commands.init import ROUNDS, STEPS, Workload


@pytest.mark.parametrize(
    ("clients", "examples", "rounds", "steps"), [(3, 14, 5, 4), (5, 58, 10, 8), (8, 216, 14, 20), (1, 72_000, 50, 40)]
)
def test_of_federations_of_every_size(clients, examples, rounds, steps):
    """Training examples, of which a batch has four. Of 58: a pass has 14.5 steps, half of one is 8; five passes are
    72.5 steps, in 10 rounds."""
    found = Workload.of([examples] * clients, 5, 4)
    assert (found.rounds, found.steps) == (rounds, steps)


def test_two_hundred_clients_of_fourteen_examples_are_not_drilled():
    assert Workload.of([14] * 200, init.PASSES, init.BATCH).passes < 15


sizes = st.lists(st.integers(1, 200_000), min_size=1, max_size=350)


@given(sizes, st.sampled_from([(init.PASSES, init.BATCH), (init.LABEL_PASSES, init.LABEL_BATCH)]))
def test_within_limits(sizes, goal):
    found = Workload.of(sizes, *goal)
    assert ROUNDS[0] <= found.rounds <= ROUNDS[1] and STEPS[0] <= found.steps <= STEPS[1]


def test_what_is_compared_takes_the_rounds_and_steps_of_the_file():
    def rows(method: str, clients: int) -> dict[str, list[str]]:
        work = Workload.of([72] * clients, init.PASSES, init.BATCH)
        found: dict[str, list[str]] = init.settings_of(method, work, known_base.SLOW, {})["rows"]
        return found

    assert rows("fedlora", 5) == {"local": ["method=local"], "fedlora": []}
    assert rows("local", 5) == {"local": [], **{name: [f"method={name}"] for name in ("fedit", "fedlora", "fedalt")}}
    assert rows("local", 1) == {}
