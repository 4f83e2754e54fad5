"""What launchers, job systems and shells leave in the environment."""

import socket

import pytest
from small_launch import torchrun

from llm_fed.basics import launchers
from llm_fed.basics.errors import UserError
from llm_fed.basics.launchers import ProcessRank
from llm_fed.runtime import launch

MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
SLURM = {
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7",
}  # fmt: skip
BY_ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (torchrun(1, 2), ProcessRank(1, 1, 2)),
        ({**torchrun(0, 4), **SLURM, **MPI}, ProcessRank(0, 0, 4)),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"LOCAL_RANK": "0"}, None),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, None),
        ({**MPI, "MASTER_ADDR": "localhost"}, None),
        ({**MPI, **BY_ACCELERATE}, ProcessRank(1, 0, 2)),
        (BY_ACCELERATE, None),
        (SLURM, None),
    ],
)
def test_the_place_of_a_process(environment, expected):
    assert launchers.process_rank(environment) == expected


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "2"}, "RANK='2' LOCAL_RANK='0' WORLD_SIZE='2' do not say which of how many processes this is"),
        ({"WORLD_SIZE": "two"}, "RANK='0' LOCAL_RANK='0' WORLD_SIZE='two' do not say"),
        ({"RANK": ""}, "RANK='' LOCAL_RANK='0' WORLD_SIZE='2' do not say"),
        ({"LOCAL_RANK": "-1"}, "RANK='0' LOCAL_RANK='-1' WORLD_SIZE='2' do not say"),
    ],
)
def test_a_place_that_cannot_be(changed, says):
    with pytest.raises(UserError) as error:
        launchers.process_rank({**torchrun(0, 2), **changed})
    assert str(error.value).startswith(says) and "where no launcher started it: unset RANK " in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_MIXED_PRECISION", "fp8"),
    ],
)
def test_settings_that_are_not_ours(name, value):
    with pytest.raises(UserError, match=f"accelerate's configuration sets {name}={value}, which has no effect.*Leave"):
        launchers.check(None, {**BY_ACCELERATE, name: value})


def test_settings_that_change_nothing_are_no_matter():
    """As `accelerate launch` sets them where it is told nothing."""
    plain = {
        **BY_ACCELERATE, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_USE_FSDP": "false",
        "PARALLELISM_CONFIG_TP_SIZE": "1", "ACCELERATE_USE_CPU": "False", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    }  # fmt: skip
    launchers.check("float32", plain)
    assert not launchers.wants_cpu(plain) and launchers.wants_cpu({"ACCELERATE_USE_CPU": "True"})


def test_a_mixed_precision_that_is_computed_in_is_no_matter():
    environment = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    launchers.check("bfloat16", environment)
    with pytest.raises(UserError, match="mixed_precision: bf16 .* it is float32.* or base.dtype=bfloat16"):
        launchers.check("float32", environment)


def test_who_seems_to_have_meant_several_processes_is_told():
    assert launchers.copy_of({}) == launchers.copy_of({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) == ""
    assert launchers.copy_of(SLURM).startswith("; this is copy 3 of 4 (SLURM_STEP_NUM_TASKS) that srun")
    assert launchers.notes({}) == launchers.notes(torchrun(0, 2)) == launchers.notes(SLURM) == []
    assert "scripts/launch/cpu-2.yaml" in launchers.notes(BY_ACCELERATE)[0]
    assert launchers.notes({"WORLD_SIZE": "8"})[0].startswith("WORLD_SIZE=8 is set, but no LOCAL_RANK")


@pytest.mark.parametrize("port", ["", "70000", "x"])
def test_where_ranks_meet_must_be_known(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UserError, match=f"rank 0 of 2: .* do not meet at 127.0.0.1:{port} .MASTER_ADDR, MASTER_PORT"):
        launch.meet(ProcessRank(0, 0, 2))


def test_a_port_that_is_taken(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(UserError, match="do not meet at 127.0.0.1:.*choose another port"):
            launch.meet(ProcessRank(0, 0, 2))
