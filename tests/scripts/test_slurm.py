"""The batch file for SLURM, with stand-ins for what a cluster has: they say what they were called with."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = {
    # As many tasks as nodes, each with its number.
    "srun": 'for n in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$n "$@"; done',
    "scontrol": "printf 'node7\\nnode8\\n'",
    "llm-fed": 'echo "llm-fed [$*] $OMP_NUM_THREADS $HF_HUB_OFFLINE"',
    "torchrun": 'echo "torchrun [$*]"',
}


@pytest.fixture
def sbatch(tmp_path):
    """What the file does on so many nodes."""
    for name, code in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{code}\n")
        path.chmod(0o755)

    def call(*words: str, nodes: int = 1, **variables: str) -> list[str]:
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456", **variables,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", ROOT / "scripts/launch/slurm.sh", *words], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return call


def test_one_process_needs_no_launcher(sbatch):
    said = sbatch("mine.yaml", "task.template=a b", "--out", "runs/mine", SLURM_CPUS_PER_TASK="6")
    assert said == ["llm-fed [run mine.yaml task.template=a b --out runs/mine] 6 1"]


def test_of_several_nodes_each_has_a_launcher_that_meets_at_the_first(sbatch):
    said = sbatch("mine.yaml", "--out", "runs/m i", nodes=2, SLURM_GPUS_ON_NODE="4")
    assert sorted(said) == [  # they start at once
        f"torchrun [--nnodes 2 --node_rank {node} --nproc_per_node 4 --master_addr node7 --master_port 23456 "
        "-m llm_fed.cli run mine.yaml --out runs/m i]"
        for node in range(2)
    ]


def test_a_failure_is_the_jobs(sbatch, tmp_path):
    (tmp_path / "bin/llm-fed").write_text("#!/bin/bash\nexit 2\n")
    with pytest.raises(AssertionError):
        sbatch("mine.yaml")
