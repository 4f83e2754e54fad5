"""Two real processes of one launch, over gloo: the same numbers as one, kills, errors, and nobody left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import every
import outside
import pytest
import tiny_images
import yaml
from equal_runs import assert_same
from small_launch import PATIENCE, Launch, Patience, Stall, free_port
from small_process import Kill, llm_fed

REPOSITORY = Path(__file__).parents[2]
METHODS = {"fedit": {"name": "fedit"}, "fedmerge": {"name": "fedmerge", "num_models": 2}}
SIGINT = pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow)
LATE = {"delay": {"sigma": 0.8}, "participation": 0.7}


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory):
    """By method the folder of a run in one process, made when it is first asked for, and its configuration."""
    made: dict[str, tuple[Path, Path]] = {}

    def run(method: str) -> tuple[Path, Path]:
        if method not in made:
            folder = tmp_path_factory.mktemp(method)
            config = small.config(folder / "config.yaml", method=METHODS[method], **LATE)
            assert llm_fed(["run", str(config), "--out", str(folder / "run")], folder / "log") == 0
            made[method] = folder / "run", config
        return made[method]

    return run


@pytest.mark.parametrize("method", [pytest.param("fedit", marks=pytest.mark.slow), "fedmerge"])
def test_two_processes_as_one(alone, tmp_path, method):
    whole, config = alone(method)
    launch = Launch(tmp_path, ["run", config, "--out", tmp_path / "run"])
    assert launch.ended() == [0, 0]
    assert launch.said(1) == "" and launch.said(0).count("adapters, metrics and report.html are in") == 1
    assert_same(whole, tmp_path / "run")
    environments = [json.loads((run / "environment.json").read_text()) for run in (whole, tmp_path / "run")]
    assert [environment["processes"] for environment in environments] == [1, 2]


@pytest.mark.slow
def test_image_models_in_two_processes(tmp_path):
    tree = tiny_images.tree(tiny_images.npz(tmp_path / "data.npz"), rounds=2, method={"name": "fedbuff", "buffer": 2})
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    assert llm_fed(["run", str(config), "--out", str(tmp_path / "one")], tmp_path / "log") == 0
    assert Launch(tmp_path, ["run", config, "--out", tmp_path / "two"]).ended() == [0, 0]
    assert_same(tmp_path / "one", tmp_path / "two", tolerance=0)


def test_a_method_in_the_folder_in_which_a_launch_begins(here):
    """Every process finds it there, and its losses where these are to be computed."""
    outside.module(here, "own", outside.SMOOTHED)
    tree = tiny_images.tree(tiny_images.npz(here / "data.npz"), rounds=2, method={"name": "own:Smoothed"})
    (here / "config.yaml").write_text(yaml.safe_dump(tree))
    assert llm_fed(["run", "config.yaml", "--out", "one"], here / "log") == 0, (here / "log").read_text()
    launch = Launch(here, ["run", "config.yaml", "--out", "two"])
    assert launch.ended() == [0, 0], (launch.said(0), launch.said(1))
    assert_same(here / "one", here / "two", tolerance=0)


@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again(alone, tmp_path):
    """With --max-restarts: rank 0 dies in its first round, and the second attempt goes on from its checkpoint."""
    whole, config = alone("fedmerge")
    (tmp_path / "dies.py").write_text(
        "import os, signal, sys\n"
        "from llm_fed.cli import main\n"
        "from llm_fed.runs.folder import Run\n"
        "if os.environ['RANK'] == os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    Run.log_timing = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(sys.argv[1:])\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}"]
    words = [sys.executable, *torchrun, "dies.py", "run", str(config), "--out", "run"]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=10 * PATIENCE)
    printed = said.stdout + said.stderr
    assert said.returncode == 0 and "continuing at round 2" in printed, printed
    assert_same(whole, tmp_path / "run")


def test_killed_and_continued_with_another_number_of_processes(alone, tmp_path):
    """Two, then one, then two."""
    whole, config = alone("fedmerge")
    words = ["run", str(config), "--out", str(tmp_path / "run")]
    launch = Launch(tmp_path, words, {0: Kill("llm_fed.runs.folder:Run.log_timing")})
    assert launch.ended() == [-signal.SIGKILL, 1] and launch.said(1) == ""
    log = tmp_path / "log"
    assert llm_fed(words, log, Kill("llm_fed.runs.folder:Run.log_timing")) == -signal.SIGKILL
    assert "continuing at round 2" in log.read_text() and "processes 2 -> 1" in log.read_text()
    launch = Launch(tmp_path, words)
    assert launch.ended() == [0, 0] and "continuing at round 3" in launch.said(0)
    assert_same(whole, tmp_path / "run")


def test_a_killed_worker_ends_the_launch_with_a_message(alone, tmp_path):
    whole, config = alone("fedmerge")
    words = ["run", config, "--out", tmp_path / "run"]
    launch = Launch(tmp_path, words, {1: Kill("llm_fed.runtime.accelerate:perform", 3)})
    assert launch.ended() == [1, -signal.SIGKILL]
    assert "llm-fed: rank 1 of this launch has gone (" in launch.said(0).splitlines()[-1]
    assert "give the same command again to continue" in launch.said(0) and "Traceback" not in launch.said(0)
    launch = Launch(tmp_path, words)
    assert launch.ended() == [0, 0]
    assert_same(whole, tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        pytest.param(["local.lrr=1"], 2, "llm-fed: unknown key local.lrr", marks=pytest.mark.slow),
        (["base.name=./nowhere"], 2, "llm-fed: base.name='./nowhere' is not a folder"),
        pytest.param(["base.device_map=auto"], 2, "llm-fed: base.device_map", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_said_once(alone, tmp_path, words, code, text):
    _, config = alone("fedit")
    launch = Launch(tmp_path, ["run", config, "--out", tmp_path / "run", *words])
    assert launch.ended() == [code, 0]
    assert launch.said(0).startswith(text) and len(launch.said(0).splitlines()) <= 2 and launch.said(1) == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", every.quick([0, 1], [1]))
def test_a_rank_that_never_comes_is_named_in_a_bounded_time(alone, tmp_path, rank):
    """Or the variables of a launch are left in a shell. Whoever waits says for whom, and then what to unset."""
    _, config = alone("fedit")
    words = ["run", config, "--out", tmp_path / "run"]
    launch = Launch(tmp_path, words, {rank: Patience(3.0)}, ranks=[rank])
    assert launch.ended() == [2]
    waits, ends = (line for line in launch.said(0).splitlines() if line.startswith("llm-fed"))
    assert waits.startswith(f"llm-fed: rank {rank} is waiting for others of 2 at 127.0.0.1:")
    assert ends.startswith(f"llm-fed: rank {rank} of 2: the processes of this launch do not meet at 127.0.0.1:")
    assert ends.endswith("where no launcher started it: unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT")
    assert not (tmp_path / "run").exists()


def test_what_accelerate_was_told_and_would_not_happen_is_refused_at_every_rank(alone, tmp_path):
    _, config = alone("fedit")
    also = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}
    launch = Launch(tmp_path, ["run", config, "--out", tmp_path / "run"], also=also)
    assert launch.ended() == [2, 2]
    for rank in range(2):
        (line,) = launch.said(rank).splitlines()
        assert line.startswith("llm-fed: accelerate's configuration sets ACCELERATE_USE_FSDP=true, which has no effect")
    assert not (tmp_path / "run").exists()


def test_variables_without_a_launcher_leave_a_process_alone(alone, tmp_path):
    """With device=cpu, where accelerate itself would wait for the others."""
    whole, config = alone("fedit")

    def kubeflow(rank: int, size: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": str(size), "PMI_SIZE": str(size), "OMPI_COMM_WORLD_SIZE": str(size)}

    words = ["run", config, "--out", tmp_path / "run", "device=cpu"]
    launch = Launch(tmp_path, words, ranks=[0], variables=kubeflow)
    assert launch.ended() == [0]
    assert "on cpu in 1 process" in launch.said(0) and "WORLD_SIZE=2 is set, but no LOCAL_RANK" in launch.said(0)
    assert_same(whole, tmp_path / "run", tolerance=0)


@pytest.mark.slow
def test_accelerate_over_mpirun_is_a_launch(alone, tmp_path):
    """Only MPI's own variables say the ranks there."""
    whole, config = alone("fedit")

    def mpirun(rank: int, size: int) -> dict[str, str]:
        names = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_SIZE": size}
        return {name: str(value) for name, value in names.items()}

    words = ["run", config, "--out", tmp_path / "run"]
    also = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}
    launch = Launch(tmp_path, words, variables=mpirun, also=also)
    assert launch.ended() == [0, 0]
    assert "on cpu in 2 processes" in launch.said(0) and launch.said(1) == ""
    assert_same(whole, tmp_path / "run")


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, -signal.SIGTERM), SIGINT])
def test_all_are_told_to_end_while_rank_0_waits_for_the_other(alone, tmp_path, ending, code):
    """A launcher that has lost a third process sends SIGTERM, a terminal SIGINT."""
    _, config = alone("fedit")
    busy = tmp_path / "busy"
    stall = Stall("llm_fed.runtime.accelerate:perform", busy)
    launch = Launch(tmp_path, ["run", config, "--out", tmp_path / "run"], {1: stall})
    while launch.processes[0].is_alive() and not busy.exists():
        time.sleep(0.05)
    time.sleep(0.5)  # rank 0 has done its own share
    for process in launch.processes:
        os.kill(process.pid, ending)
    assert launch.ended() == [130, code] and launch.said(1) == ""
    assert launch.said(0).endswith(
        "llm-fed: interrupted; give the same command again to continue from the last checkpoint\n"
    )
    assert ("terminated, because" in launch.said(0)) == (ending == signal.SIGTERM)


def test_commands_that_train_nothing(tmp_path):
    launch = Launch(tmp_path, ["methods", "--json"])
    assert launch.ended() == [0, 0]
    assert json.loads(launch.said(0)) and launch.said(1) == ""


@pytest.mark.slow
def test_runs_one_after_another_with_trackers(small, tmp_path):
    """A tracker that ends must not take the connection of the ranks along."""
    pytest.importorskip("tensorboard")
    config = small.config(tmp_path / "config.yaml", rounds=1, track={"with": ["tensorboard"]})
    launch = Launch(tmp_path, ["compare", config, "--methods", "local,potara", "--out", tmp_path / "out"])
    assert launch.ended() == [0, 0], launch.said(0)
    assert len(list((tmp_path / "out").rglob("trackers"))) == 2  # of local and of the fedit run that potara needs
    rows = json.loads((tmp_path / "out/table.json").read_text())["rows"]
    assert [row["label"] for row in rows] == ["local", "potara"]


@pytest.mark.slow
def test_the_launchers_themselves(alone, tmp_path):
    whole, config = alone("fedmerge")
    programs = Path(sys.executable).parent
    accelerate = [programs / "accelerate", "launch", "--config_file", REPOSITORY / "scripts/launch/cpu-2.yaml"]
    torchrun = [programs / "torchrun", "--standalone", "--nproc_per_node", "2"]
    script = REPOSITORY / "scripts/train.py"
    for number, command in enumerate(
        (
            [*accelerate, "--main_process_port", "0", script],
            [*torchrun, script],
            [*accelerate, "--main_process_port", "0", "--module", "llm_fed.cli", "run"],
        )
    ):
        done = start(*command, config, "--out", tmp_path / str(number))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("adapters, metrics and report.html are in") == 1
        assert_same(whole, tmp_path / str(number))
    shutil.rmtree(tmp_path / "0")
    done = start(*accelerate, "--main_process_port", "0", script, config, "rounds=0", "--out", tmp_path / "0")
    assert done.returncode != 0 and done.stderr.count("llm-fed: rounds is 0; it must be at least 1") == 1


def start(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment, timeout=600)
