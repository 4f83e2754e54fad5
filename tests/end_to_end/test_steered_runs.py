"""A run that is started, killed, ended, left, continued, finished and looked at in a random order: see
`support/steered_runs.py`."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from steered_runs import SteeredRun

# Without shrinking, which would take hours.
QUIET = {
    "deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "phases": [Phase.generate],
}  # fmt: skip


def steer(small, folder, **chosen):
    machine = type("Steered", (SteeredRun,), {"small": small, "work": folder, "undisturbed": {}, "counts": {}})
    run_state_machine_as_test(machine, settings=settings(**QUIET, **chosen))
    print(dict(sorted(machine.counts.items())))
    return machine.counts


def test_in_a_few_orders(small, tmp_path):
    assert steer(small, tmp_path, max_examples=2, stateful_step_count=5, derandomize=True)


@pytest.mark.slow
def test_in_many_orders(small, tmp_path):
    counts = steer(small, tmp_path, max_examples=12, stateful_step_count=10)
    assert sum(counts.values()) > 20
