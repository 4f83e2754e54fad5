"""scripts/gpu: steps with tiny shapes on a CPU, what is left of them, tables of their lines, and bundles."""

import importlib
import json
import random
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts" / "gpu"
HEAD = {"step": "large", "card": "Card 1", "torch": "2.11", "commit": "abc"}
BASE, CASE = "llama-3.2-3b, 8 clients", "llama-3.2-3b, 100 clients"
TINY = (True, 100.0)  # tiny shapes, and seconds of a step


@pytest.fixture
def module(monkeypatch) -> Callable[[str], Any]:
    """A script as a module, which is forgotten afterwards, as its name is an ordinary word."""
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.with_name("bench")), *sys.path])
    for name in ("run", "steps", "table", "bundle", "measure", "cohort", "peer_loops", "serving"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["training", "generation", "evidence", "large", "serve"])
def test_each_step_measures_what_its_lines_lack(module, tmp_path, step):
    run, about = module("run"), module("steps").STEPS[step]
    assert run.measured(step, tmp_path, *TINY) == 0, lines(tmp_path)
    found = {line["figure"]["case"]: line["figure"] for line in lines(tmp_path) if run.is_measured(line)}
    assert sorted(found) == sorted(about.tiny) and set(about.tiny) <= set(about.cases)
    for case, figure in found.items():
        assert {"tiny", "transformers", "liger"} <= figure.keys() and len(about.columns.keys() & figure.keys()) > 1
        if "dense" in case:
            assert figure["replayed"] == figure["micro_batches"] > 0, case
    before = lines(tmp_path)
    assert run.measured(step, tmp_path, *TINY) == 0 and lines(tmp_path) == before


def test_what_was_cut_off_comes_last_and_what_failed_is_tried_again(module, tmp_path, monkeypatch):
    run, measure, seen = module("run"), module("measure"), []
    first, second = module("steps").STEPS["generation"].tiny

    def measured(setting: Any, step: str, case: str) -> dict[str, Any]:
        seen.append(case)
        if len(seen) == 1:
            raise KeyboardInterrupt
        if len(seen) == 2:
            raise ValueError("once")
        return {"seconds": 1}

    monkeypatch.setattr(measure, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        run.measured("generation", tmp_path, *TINY)
    assert run.measured("generation", tmp_path, *TINY) == 1 and seen == [first, second, first]
    assert run.measured("generation", tmp_path, *TINY) == 0 and seen[3:] == [second]
    (tmp_path / "results.jsonl").unlink()
    assert run.measured("generation", tmp_path, True, 0.0) == 75 and len(lines(tmp_path)) == 2


def test_a_step_is_stopped_when_its_time_is_up(module, tmp_path, capsys):
    assert module("run").started("large", tmp_path, False, 0.01) == 75
    assert capsys.readouterr().out == "large: time is up\n"


def test_the_page_is_what_the_kept_lines_say(module):
    table = module("table")
    page = table.PAGE.read_text()
    assert table.written(page, list(module("run").read(table.KEPT))) == page
    assert page.count("<!-- figures of ") == 3


def test_new_lines_are_kept_once_and_tiny_ones_never(module, tmp_path, monkeypatch):
    table, page, kept, results = module("table"), *(tmp_path / name for name in ("page.md", "kept.jsonl", "new.jsonl"))
    page.write_text("# Page\n\n<!-- figures of large, written -->\nold\n<!-- end -->\nbehind\n")
    figures = [{"case": CASE, "seconds": 2}, {"case": CASE, "tiny": True, "seconds": 3}, {"case": CASE, "error": "no"}]
    results.write_text("".join(json.dumps({**HEAD, "figure": figure}) + "\n" for figure in figures) + '{"step')
    monkeypatch.setattr(table, "KEPT", kept)
    monkeypatch.setattr(table, "PAGE", page)
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["table.py", str(results), "--write"])
        table.main()
    assert [json.loads(line)["figure"] for line in kept.read_text().splitlines()] == figures[:1]
    text = page.read_text()
    assert f"| {CASE} | 2 |" in text and "old" not in text and text.endswith("\nbehind\n")


def test_the_evidence_names_the_base_that_it_lacks(module, tmp_path, monkeypatch):
    monkeypatch.setenv("BASE", "nowhere")
    with pytest.raises(RuntimeError, match="BASE=nowhere is no folder of a base"):
        (measure := module("measure")).evidence(measure.Setting(False, tmp_path), "real_rows 8 0")


def test_a_base_may_travel_in_parts(module, tmp_path, monkeypatch):
    """They are unpacked once all are there."""
    bundle, out, weights = module("bundle"), tmp_path / "out", random.Random(0).randbytes(3000)
    for name in ("qwen", "out/code/scripts/gpu", *(f"data/{name}" for name in bundle.DATA)):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "qwen/weights").write_bytes(weights)
    (out / "code/scripts/gpu/run.py").write_text("import os; print(os.environ.get('BASE'))")
    (out / "run.sh").write_text(bundle.RUN)
    monkeypatch.setattr(bundle, "PART", 1000)
    bundle.in_parts(out, tmp_path / "qwen", tmp_path / "data")
    *others, last = sorted(out.glob("more-*"))
    kept = last.rename(tmp_path / "kept")
    for expected in ("None", str(out / "more/base/qwen")):
        done = subprocess.run(["bash", out / "run.sh"], env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
                              capture_output=True, text=True)  # fmt: skip
        assert (len(others), done.stdout.strip(), done.stderr) == (3, expected, "")
        kept.exists() and kept.rename(last)
    assert (out / "more/base/qwen/weights").read_bytes() == weights and (out / "more/data/rolebench/eng").is_dir()


@pytest.mark.slow
def test_a_bundle_runs_where_there_is_little_else_than_torch(module, tmp_path):
    """With tiny shapes, from another folder; it holds the code of a commit."""
    words = ["download", "--quiet", "--no-deps", "--retries", "0", "--dest", str(tmp_path / "index"), "iniconfig"]
    if subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True).returncode:
        pytest.skip("no index of packages can be reached")
    bundle, scripts = tmp_path / "out", module("bundle")
    made = subprocess.run([sys.executable, GPU / "bundle.py", bundle, "--cuda", "130"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    venv.create(tmp_path / "bare", symlinks=True)
    site = next((tmp_path / "bare/lib").glob("python*/site-packages"))
    for name in scripts.closure(scripts.PRESENT, without=["typer"]):
        its = distribution(name)
        for top in {file.parts[0] for file in its.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(str(its.locate_file(top)))
    done = subprocess.run(
        ["bash", bundle / "run.sh", "--tiny", "--out", "results"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHON": str(tmp_path / "bare/bin/python"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    steps = module("steps").STEPS
    assert done.returncode == 0 and done.stdout.count(": done\n") == len(steps), (done.stdout, done.stderr[-3000:])
    found = {
        (line["step"], line["figure"]["case"]) for line in lines(tmp_path / "results") if "error" not in line["figure"]
    }
    assert found == {(name, case) for name, step in steps.items() for case in step.tiny}
    assert {line["commit"] for line in lines(tmp_path / "results")} == {head[:12]}
