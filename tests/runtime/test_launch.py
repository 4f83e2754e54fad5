"""Two real processes of one launch, over gloo: the same numbers as one, kills, errors, and nobody left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import outside
import pytest
import tiny_images
import yaml
from equal_runs import assert_same
from small_launch import Launch, Stall
from small_process import Kill, llm_fed

REPOSITORY = Path(__file__).parents[2]
METHODS = {"fedit": {"name": "fedit"}, "fedmerge": {"name": "fedmerge", "num_models": 2}}
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
        (["local.lrr=1"], 2, "llm-fed: unknown key local.lrr"),
        (["base.name=./nowhere"], 2, "llm-fed: base.name='./nowhere' is not a folder"),
        (["base.device_map=auto"], 2, "llm-fed: base.device_map"),
    ],
)
def test_a_mistake_is_said_once(alone, tmp_path, words, code, text):
    _, config = alone("fedit")
    launch = Launch(tmp_path, ["run", config, "--out", tmp_path / "run", *words])
    assert launch.ended() == [code, 0]
    assert launch.said(0).startswith(text) and len(launch.said(0).splitlines()) <= 2 and launch.said(1) == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
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
    assert [row["label"] for row in json.loads((tmp_path / "out/table.json").read_text())["rows"]] == [
        "local",
        "potara",
    ]


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
