"""`base.dtype: auto`: what it means where, that a run keeps what it began with, and that equal runs are equal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from equal_runs import assert_equal
from network import HELLO, NetworkInProcess, federate, tree

from llm_fed import load_client
from llm_fed.bench import build
from llm_fed.commands.comparison import ComparisonPlan
from llm_fed.commands.evaluate import evaluate_run
from llm_fed.commands.section import read_rows
from llm_fed.experiment import run as experiment
from llm_fed.models import loading
from llm_fed.models.loading import settle_dtype
from llm_fed.network.node import Node
from llm_fed.runs.folder import Run
from llm_fed.runs.reading import saved_config
from llm_fed.settings.config import BaseConfig
from llm_fed.settings.configfile import from_dict

HINT = loading.bfloat16_hint  # which other tests do without, see without.py
AUTO = {"dtype": "auto"}


@pytest.fixture
def interrupted(monkeypatch):
    """Trains until the first round is saved."""

    def stop(*_):
        raise KeyboardInterrupt

    def call(config, folder):
        with monkeypatch.context() as patch:
            patch.setattr(Run, "log_timing", stop)
            with pytest.raises(KeyboardInterrupt):
                experiment.train(config, folder)

    return call


@pytest.mark.parametrize(
    "device, has_it, dtype, line",
    [
        ("cpu", False, "float32", "computing in float32, the default on this device (cpu); base.dtype overrides"),
        ("cuda:1", True, "bfloat16", "computing in bfloat16, the default on this device (cuda); base.dtype overrides"),
        ("cuda", False, "float32", "computing in float32, the default on this device (cuda); base.dtype overrides"),
        ("mps", True, "float32", "computing in float32, the default on this device (mps); base.dtype overrides"),
    ],
)
def test_what_auto_means_on_a_device(monkeypatch, device, has_it, dtype, line):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_it and not including_emulation)
    assert settle_dtype(BaseConfig("x"), device) == (BaseConfig("x", dtype=dtype), line)
    assert settle_dtype(BaseConfig("x", dtype="float16"), device) == (BaseConfig("x", dtype="float16"), "")


@pytest.mark.parametrize("flags, has_it", [("fpu avx2", False), ("fpu avx512_bf16", True), ("", False)])
def test_a_cpu_says_by_its_flags_what_it_has(monkeypatch, tmp_path, flags, has_it):
    """Nobody is told to compute in bfloat16 on a CPU that would be slow in it."""
    (tmp_path / "cpuinfo").write_text(f"model name : x\nflags\t\t: {flags}\n" if flags else "model name : x\n")
    monkeypatch.setattr(loading, "CPU", tmp_path / "cpuinfo")
    assert bool(HINT()) is has_it


def test_it_is_the_default_is_said_and_lies_in_the_environment(small, llm_fed, tmp_path):
    """Given by its name it is the same run, another dtype is another one."""
    settings = small.tree(rounds=1)
    del settings["base"]["dtype"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    run = ("run", tmp_path / "c.yaml", "--out", tmp_path / "run")
    said = llm_fed(*run)
    assert said.code == 0 and said.err.count("computing in float32") == 1
    assert json.loads((tmp_path / "run/environment.json").read_text())["dtype"] == "float32"
    assert "dtype: float32" in (tmp_path / "run/adapters/ada/README.md").read_text()  # a card says what was done
    for words in ([], ["base.dtype=float32"]):
        again = llm_fed(*run, *words)
        assert again.code == 0 and "is complete" in again.err
    llm_fed(*run, "base.dtype=bfloat16").assert_refused("another configuration (base.dtype: 'float32' -> 'bfloat16')")


def test_a_run_keeps_its_dtype_on_another_machine(small, tmp_path, interrupted, monkeypatch):
    config = from_dict(small.tree(rounds=2, base=AUTO))
    experiment.train(config, tmp_path / "whole")
    interrupted(config, tmp_path / "run")

    def elsewhere(base, device):
        return (replace(base, dtype="bfloat16"), "a GPU") if base.dtype == "auto" else (base, "")

    monkeypatch.setattr(build, "settle_dtype", elsewhere)
    experiment.train(config, tmp_path / "run")
    assert_equal(tmp_path / "run", tmp_path / "whole")
    scores = json.loads((tmp_path / "run/summary.json").read_text())["scores"]
    assert evaluate_run(tmp_path / "run")["scores"]["mean"] == scores["mean"]  # in the run's own dtype


def test_a_run_without_results_begins_anew_in_what_suits_the_machine(small, tmp_path):
    """Whoever gave up on a slow first round gets the faster dtype by the same command."""
    with Run(tmp_path / "run", from_dict(small.tree(base={"dtype": "bfloat16"}))) as run:
        run.begin()
    experiment.train(from_dict(small.tree(rounds=1, base=AUTO)), tmp_path / "run")
    assert saved_config(tmp_path / "run")["base"]["dtype"] == "float32"


def plan(small, folder: Path, rows: dict[str, list[str]], words: list[str]) -> ComparisonPlan:
    folder.mkdir(exist_ok=True)
    (folder / "c.yaml").write_text(yaml.safe_dump(small.tree(rounds=1, base=AUTO) | {"compare": {"rows": rows}}))
    return ComparisonPlan(read_rows(folder / "c.yaml", words), folder / "out")


def test_in_a_comparison_auto_and_what_it_means_are_one_run(small, tmp_path):
    made = plan(small, tmp_path, {"a": ["method=fedit"], "b": ["method=fedit", "base.dtype=float32"]}, [])
    assert len(list(made.jobs())) == 1 and made.file.base.dtype == "float32"
    assert [note.partition(",")[0].partition(";")[0] for note in made.notes] == ["computing in float32"]


def test_a_comparison_that_was_begun_goes_on_in_its_dtype(small, tmp_path):
    """Also a row that is still to be trained, and what a row needs; but a row that names a dtype has its own."""
    rows = {"a": ["method=local"], "b": ["method=potara"], "own": ["method=local", "base.dtype=float32"]}
    old = plan(small, tmp_path, rows, ["base.dtype=bfloat16"])
    begun = next(job for job in old.jobs() if job.method.__class__.__name__ == "FedIT")  # needed by b
    experiment.train(begun.config, begun.folder)
    now = plan(small, tmp_path, rows, [])
    dtypes = {label: job.config.base.dtype for (label, _), job in now.cells.items()}
    assert dtypes == {"a": "bfloat16", "b": "bfloat16", "own": "float32"}
    assert now.cells["b", 0].parents["fedit"].folder == begun.folder and now.cells["b", 0].parents["fedit"].outcome
    assert now.notes == ["computing in bfloat16, as in the runs that are there"]

    explicit = plan(small, tmp_path / "other", {"x": ["method=local", "base.dtype=bfloat16"]}, [])
    (job,) = explicit.jobs()
    experiment.train(job.config, job.folder)
    both = {"x": ["method=local", "base.dtype=bfloat16"], "y": ["method=local"]}
    assert plan(small, tmp_path / "other", both, []).cells["y", 0].config.base.dtype == "float32"


@pytest.mark.usefixtures("quick")
def test_over_a_network_the_server_decides_for_all(small, tmp_path):
    link, _ = federate(tmp_path, small, tree(small, rounds=1, base=AUTO, method={"name": "mean"}))
    assert {order["dtype"] for order in link.orders} == {"float32"}
    assert json.loads((tmp_path / "run/environment.json").read_text())["dtype"] == "float32"
    node = Node()
    there = NetworkInProcess(tmp_path, small, tree(small, base=AUTO)).places[1]
    text = yaml.safe_dump(small.tree(base=AUTO))
    for dtype in ("bfloat16", "float32"):
        reply, _ = node.answer(there, text, {**HELLO, "dtype": dtype}, b"")
        assert "error" not in reply
        assert {str(p.dtype) for p in node._bases._base.model.parameters()} == {f"torch.{dtype}"}


def test_a_library_call_takes_auto_too(small, finished):
    personal = load_client(finished / "adapters/ada", str(small.base), dtype="auto")
    assert personal.base.dtype == torch.float32 and personal.base.autocast is None


def test_a_cpu_that_is_faster_in_bfloat16_is_told(small, llm_fed, tmp_path, monkeypatch):
    """Where float32 is chosen by `auto`, once, not where it is given; on another CPU what bfloat16 costs, if given."""
    monkeypatch.setattr(loading, "bfloat16_hint", HINT)
    monkeypatch.setattr(loading, "CPU", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags : fpu amx_bf16\n")
    settings = small.tree(rounds=1, base=AUTO, local={"steps": 1}, eval={"every": 0, "max_new_tokens": 1})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    said = "this CPU computes in bfloat16"
    assert llm_fed("run", tmp_path / "c.yaml", "--out", tmp_path / "run").err.count(said) == 1
    assert llm_fed("init", small.data, "--base", small.base, "--out", tmp_path / "i.yaml").out.count(said) == 1
    assert said not in llm_fed("run", tmp_path / "c.yaml", "base.dtype=float32", "--out", tmp_path / "given").err
    (tmp_path / "cpuinfo").write_text("flags : fpu avx2\n")
    assert "so base.dtype=bfloat16 may" not in llm_fed("run", tmp_path / "c.yaml", "--out", tmp_path / "slow").err
    assert "is slow on this CPU" in llm_fed("run", tmp_path / "c.yaml", "base.dtype=bfloat16", "--dry-run").err
