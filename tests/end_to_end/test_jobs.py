"""`llm-fed compare --jobs N` with real processes: the runs equal those that were trained one after another, also after
kills."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import equal_runs
import psutil
import pytest
import torch
import yaml

from llm_fed.commands import compare, section

ROWS = {"fedit": ["method=fedit"], "local": ["method=local"], "potara": ["method=potara"]}
WILD = ["method=fedit", "local.steps=4", "local.lr=1e37", "local.lr_end=1e37"]


def write(small, path: Path, rows, seeds) -> Path:
    tree = small.tree(rounds=2)
    path.write_text(yaml.safe_dump({**tree, "compare": {"seeds": seeds, "rows": rows}}, sort_keys=False))
    return path


def runs(out: Path) -> dict[str, dict[str, bytes]]:
    """By run its files but for times."""
    folders = sorted(config.parent for config in [*out.glob("*/config.yaml"), *out.glob("needs/*/config.yaml")])
    return {str(folder.relative_to(out)): equal_runs.files(folder) for folder in folders}


@pytest.fixture
def threads(monkeypatch) -> None:
    """All processes have as many as this one."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


@pytest.mark.parametrize(
    ("jobs", "message"), [("ray", "--jobs ray needs Ray"), ("0", "a whole number from 1 on, or ray"), ("x", "or ray")]
)
def test_a_number_of_jobs_that_cannot_be(small, tmp_path, llm_fed, monkeypatch, jobs, message):
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    config = write(small, tmp_path / "c.yaml", ROWS, [0])
    llm_fed("compare", config, "--out", tmp_path / "out", "--jobs", jobs).assert_refused(message)


@pytest.mark.slow
def test_runs_side_by_side_equal_runs_in_turn(small, tmp_path, threads, llm_fed):
    """Byte for byte: federations and a merge of them, with a row that fails and one that another command finished."""
    config = write(small, tmp_path / "c.yaml", {**ROWS, "wild": WILD}, [0])
    one, two, before = tmp_path / "one", tmp_path / "two", psutil.Process().children()
    assert llm_fed("compare", config, "--out", one).code == 1
    said = llm_fed("compare", config, "--out", two, "--jobs", 2)
    assert said.code == 1 and "wild seed 0 failed, see table.md" in said.err.splitlines()[-1]
    assert runs(one).keys() == runs(two).keys() and len(runs(one)) == 4
    for name, files in runs(one).items():
        its = runs(two)[name]
        assert files.keys() == its.keys() and [each for each in files if files[each] != its[each]] == []
    tables = [
        re.sub(r"\| [\d.]+ (\| [\d.]+ (?:kB|bytes))", r"\1", (out / "table.md").read_text()) for out in (one, two)
    ]
    assert tables[0] == tables[1]  # but for seconds
    assert "2 runs at a time, each in a process of its own" in said.err and re.search(
        r"local-seed0: run \d of 4", said.err
    )
    assert "fedit-seed0: " in said.err and "its log is" in said.err
    assert {*psutil.Process().children()} <= {*before}
    log = (two / "logs/wild-seed0.log").read_text()
    assert "every client of round 1 failed" in said.err and "learning rate 1e+37" in log


def test_a_dry_run_lists_runs(small, tmp_path, llm_fed):
    config = write(small, tmp_path / "c.yaml", ROWS, [0])
    said = llm_fed("compare", config, "--out", tmp_path / "out", "--jobs", 2, "--dry-run")
    assert said.code == 0 and not (tmp_path / "out").exists()
    assert "potara-seed0 would be a new run, after fedit-seed0 and local-seed0" in said.out
    assert "at a time  2" in said.out
    plan = json.loads(llm_fed("compare", config, "--out", tmp_path / "out", "--jobs", 9, "--dry-run", "--json").out)
    assert plan["jobs"] == 3 and [run["complete"] for run in plan["runs"]] == [False] * 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["parent", "child", "Ctrl-C", "terminated"])
def test_killed_at_any_moment(small, tmp_path, threads, how):
    """No process is left, and the same command ends with the same files."""
    config = write(small, tmp_path / "c.yaml", ROWS, [0, 1])
    whole = tmp_path / "whole"
    compare.compare(section.read_rows(config), whole)
    chance = random.Random(how)
    for number in range(2):
        out = tmp_path / str(number)
        command = [sys.executable, "-m", "llm_fed.cli", "compare", str(config), "--out", str(out), "--jobs"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*command, "2"], start_new_session=True, **quiet)
        finished, children = chance.randrange(6), list[psutil.Process]()
        while process.poll() is None and not (children and len(list(out.glob("*/summary.json"))) >= finished):
            time.sleep(0.01)
            children = psutil.Process(process.pid).children()
        time.sleep(chance.random() * 3)
        if how == "parent":
            process.kill()
        elif how == "child" and children:
            chance.choice(children).kill()
        elif how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        assert process.wait() in {"Ctrl-C": (130, 0), "child": (1, 0)}.get(how, (-9, -15, 0))
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
        assert subprocess.run([*command, str(number + 1)], **quiet).returncode == 0
        assert runs(out) == runs(whole)


@pytest.mark.slow
def test_a_killed_process_of_ray_is_followed_by_another(small, tmp_path, threads):
    """Two at a time; one dies after its first checkpoint, and its run goes on to the same files."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    config = write(small, tmp_path / "c.yaml", {name: ROWS[name] for name in ("fedit", "local")}, [0])
    whole, out = tmp_path / "whole", tmp_path / "out"
    compare.compare(section.read_rows(config), whole)
    command = [sys.executable, "-m", "llm_fed.cli", "compare", str(config), "--out", str(out), "--jobs", "ray"]
    quick = {**os.environ, "RAY_worker_niceness": "0"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quick)
    killed = ""
    while process.poll() is None and not killed:
        time.sleep(0.02)
        for holder in out.rglob(".lock.holder"):
            if [*holder.parent.glob("checkpoints/round*")]:
                killed = holder.read_text().split()[0]  # its process
                os.kill(int(killed), signal.SIGKILL)
                break
    said, _ = process.communicate()
    assert process.returncode == 0 and killed, said
    told = "".join(log.read_text() for log in (out / "logs").iterdir())
    assert told.count(" takes it") == 3 and "continuing at round 2" in told, told
    assert runs(out) == runs(whole)
