"""A run that is started, killed, ended, left, continued, finished and looked at in a random order: see
`support/steered_runs.py`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from steered_runs import SteeredRun

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "report_multiple_bugs": False}


def steer(small, folder, **chosen):
    machine = type("Steered", (SteeredRun,), {"small": small, "work": folder, "undisturbed": {}, "counts": {}})
    run_state_machine_as_test(machine, settings=settings(**QUIET, **chosen))
    print(dict(sorted(machine.counts.items())))
    return machine.counts


def test_in_a_few_orders(small, tmp_path):
    assert steer(small, tmp_path, max_examples=2, stateful_step_count=5, derandomize=True)


@pytest.mark.slow
def test_in_many_orders(small, tmp_path):
    counts = steer(small, tmp_path, max_examples=60, stateful_step_count=15)
    assert sum(counts.values()) > 200
