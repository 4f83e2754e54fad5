"""Runs that are killed between any two operations on files, and runs whose disk is full."""

import itertools

import disk_faults
import every
import families
import pytest

FEW = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> disk_faults.Faulty:
    work = tmp_path_factory.mktemp("faults")
    config = families.write(work, ("local",))["local"]
    return disk_faults.Faulty(work, config)


def test_a_kill_at_any_moment_changes_no_byte(run):
    states = run.states()
    assert len(states) > 100
    some = states[:: len(states) // FEW]
    assert {path.name for state in some for path in state.glob("checkpoints/round-*")} >= {"round-0001", "round-0002"}
    for state in some:
        assert run.continued(state) == "", state


@pytest.mark.parametrize("n", every.quick([1, 5, 30, 79], [5, 79]))
def test_a_full_disk_is_said_in_one_line_and_the_same_command_goes_on(run, n):
    """5: the folder of checkpoints; 79: the deletion of an old one. Both were tracebacks once."""
    assert run.full(n) == ""


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_kill_and_no_full_disk_changes_a_byte(tmp_path, family):
    run = disk_faults.Faulty(tmp_path, families.write(tmp_path, (family,))[family])
    found = {f"killed in state {state.name}": run.continued(state) for state in run.states()}
    for n in itertools.count(1):
        if (wrong := run.full(n)) is None:
            break
        found[f"full at write {n}"] = wrong
    assert not any(found.values()), {case: wrong for case, wrong in found.items() if wrong}
