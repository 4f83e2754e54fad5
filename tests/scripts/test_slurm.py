"""Files for clusters and containers: the batch file for SLURM, with stand-ins for a cluster, and the Dockerfiles."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

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


# The Dockerfiles, which test_wheel.py builds a wheel of


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted(ROOT.glob("docker/*.Dockerfile"))


def copied(text: str) -> list[str]:
    """The files and folders of the clone that an image is built from."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    return [name for line in lines for name in line.split()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_versions_are_named_and_the_user_is_not_root(path):
    text = path.read_text()
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base) for base in re.findall(r"^FROM (\S+)", text, re.M))
    torch = re.search(r" torch==(\d+\.\d+\.\d+) ", text)
    needs = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
    assert torch and torch[1] in needs["torch"], "pip would replace it by a build with other libraries of CUDA, or none"
    pythons = re.findall(r"^FROM python:(\S+?)-", text, re.MULTILINE)
    assert pythons and all(python in SpecifierSet(PROJECT["requires-python"]) for python in pythons)
    users = re.findall(r"^USER (\w+)$", text.rpartition("\nFROM ")[2], re.MULTILINE)
    assert users and users[-1] not in ("root", "0")


def test_both_copy_the_same_and_nothing_that_is_ignored():
    (names,) = {tuple(copied(path.read_text())) for path in FILES}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(FILES) == 2 and kept == set(names)
