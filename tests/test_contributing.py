"""The method and the task that CONTRIBUTING.md prints, as printed: tried by the battery, and run."""

import json
import subprocess
import sys
from pathlib import Path

import outside
import pytest
import torch
from jsonl import write
from tiny_base import folder as base_folder

from llm_fed import tasks
from llm_fed.bench.build import prepare
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.settings.config import TaskConfig

NAME = "fedavgm:FedAvgM"


@pytest.fixture
def fedavgm(here) -> Path:
    text = outside.printed('"""FedAvgM')
    assert len(text.splitlines()) <= 40
    outside.module(here, "fedavgm", text)
    return here


@pytest.mark.slow
def test_the_battery_passes_on_it(fedavgm):
    """And needs no pytest, which an installed llm_fed does not bring."""
    outside.module(fedavgm, "pytest", "raise ImportError('the battery must not need it')")
    command = [sys.executable, "-m", "llm_fed.testing", NAME, "momentum=0.5"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines.index("whole ResNets:") > 15 and lines[0] == "adapters of a LLaMA:"
    assert all(line.startswith("  ok ") for line in lines if not line.endswith(":")) and len(lines) > 35


def test_two_rounds_of_it_are_those_of_fedavg_and_a_part_of_its_first_step(fedavgm, small, llm_fed):
    """w1 = w0 + d1 as in FedAvg, so that round 2 trains from the same point, and
    w2 = w1 + beta d1 + d2 = FedAvg's w2 + beta (FedAvg's w1 - w0)."""
    config = small.config(fedavgm / "mine.yaml", rounds=2, checkpoint={"keep": 2})
    for method, out in ((f"method={NAME}", "own"), ("method=fedavg", "fedavg")):
        beta = ["method.momentum=0.5"] if out == "own" else []
        assert llm_fed("run", config, method, *beta, "--out", out).code == 0
    own, fedavg = (
        [Checkpoints(Path(out, "checkpoints")).load(round).state["state"] for round in (1, 2)]
        for out in ("own", "fedavg")
    )
    w0 = prepare(configfile.load(config), Reporter()).server.initial()
    assert own[0]["model"].equal(fedavg[0]) and not fedavg[0].equal(w0)
    expected = fedavg[1].row + 0.5 * (fedavg[0].row - w0.row)
    torch.testing.assert_close(own[1]["model"].row, expected, rtol=0, atol=1e-7)


def test_the_merger_that_it_prints(here, small, llm_fed):
    """With as many lines as it has, ten of them code; at a low temperature the better adapter has nearly all weight."""
    text = outside.printed('"""By loss')
    assert len(text.split("@Merger")[1].splitlines()) <= 10
    outside.module(here, "by_loss", text)
    config = small.config(here / "mine.yaml", rounds=1)
    name = "by_loss:by_loss"
    said = llm_fed("run", config, f"method={name}", "method.temperature=1e-4", "--out", "own")
    assert said.code == 0, said.err
    parents = "--fed", "own/needs/fedit", "--local", "own/needs/local"
    said = llm_fed("merge", name, *parents, "--out", "merged", "method.temperature=1e-4", "--json")
    assert said.code == 0, said.err
    shares = {client: recipe["lambda_fed"] for client, recipe in json.loads(said.out)["clients"].items()}
    assert shares == {line["client"]: line["lambda_fed"] for line in read_records(Path("own/metrics.jsonl"))
                      if line["kind"] == "merge"}  # fmt: skip
    assert all(min(share, 1 - share) < 0.01 for share in shares.values())


def test_the_task_that_it_prints(here, llm_fed):
    outside.module(here, "sums", outside.printed('"""Sums'))
    data = tasks.load(TaskConfig("sums:TASK"), 0)
    row = next(row for row in data.clients["mod-3"].test if row.prompt == "Add 2 and 5.")
    assert row.answers == ("1",) and {len(client.test) for client in data.clients.values()} == {40}
    base = base_folder(here / "base")
    Path("sums.yaml").write_text(
        f"base: {{name: {base}}}\ntask: {{name: 'sums:TASK', clients: 2, template: plain}}\nmethod: {{name: fedit}}\n"
        "rounds: 1\nlocal: {steps: 1}\neval: {limit: 2, max_new_tokens: 2}\ndevice: cpu\n"
    )
    said = llm_fed("run", "sums.yaml")
    assert said.code == 0 and "mod-5" in said.out, said.err


def test_the_printed_loss_weighs_rows(here, small, llm_fed):
    """Rows of weight 0 teach nothing: of two runs that differ in them alone the adapters are the same."""
    text = outside.printed("from dataclasses import dataclass\n\nfrom torch.nn.functional")
    assert len(text.strip().splitlines()) <= 14
    outside.module(here, "weighted", text)
    for run in ("one", "other"):
        for client in ("ann", "bob"):
            rows = [{"prompt": f"w{20 + n}", "completion": f"w{4 + n % 2}", "weight": 1.0} for n in range(8)]
            rows += [{**row, "completion": "w9" if run == "one" else "w8", "weight": 0} for row in rows]
            write(here / run / f"{client}-train.jsonl", rows)
            write(here / run / f"{client}-test.jsonl", rows[:1])
        task = {"path": str(here / run), "columns": {"extra": ["weight"]}, "validation": 0.0}
        config = small.config(here / f"{run}.yaml", rounds=2, task=task, eval={"every": 0})
        assert llm_fed("run", config, "method=weighted:Weighted", "--out", run + "-run").code == 0
    one, other = (Checkpoints(Path(f"{run}-run", "checkpoints")).load(2).state["state"] for run in ("one", "other"))
    assert float((one.row - other.row).abs().max()) <= 1e-7 and float(one.row.abs().max()) > 0
