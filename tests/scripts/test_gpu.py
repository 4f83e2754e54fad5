"""scripts/gpu: a bundle, the steps that run from it and go on where they were stopped, and tables from their lines."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts" / "gpu"
HEAD = {"step": "nf4", "card": "Card 1", "torch": "2.11", "commit": "abc"}
CASE = "llama-3.2-3b, nf4"


@pytest.fixture
def scripts(monkeypatch) -> dict[str, ModuleType]:
    monkeypatch.setattr(sys, "path", [str(GPU), *sys.path])
    return {name: importlib.import_module(name) for name in ("step", "steps", "lines", "table")}


def bash(*words: object, **environment: object) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("OUT", "MODEL", "BUNDLE", "SITE", "LIMIT")}
    known = {**kept, **{key: str(value) for key, value in environment.items()}}
    return subprocess.run(["bash", *map(str, words)], env=known, capture_output=True, text=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("a bundle is made of a commit, and this is no clone")
    out = tmp_path_factory.mktemp("bundle") / "out"
    made = bash(GPU / "bundle.sh", out, "--code-only", PYTHON=sys.executable)
    assert made.returncode == 0, made.stderr
    return out


def test_a_bundle_holds_the_code_of_a_commit(bundle):
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    assert size < 60 * 2**20
    assert {path.name for path in bundle.iterdir()} == {"run.sh", "commit", "code", "package", "wheels"}
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    assert head.startswith((bundle / "commit").read_text().strip())
    for name in ("tasks/__init__.py", "eval/plots.py", "assets/tiny-base/config.json", "scripts/runs/flan.yaml"):
        assert (bundle / "package/llm_fed" / name).is_file()
    again = bash(GPU / "bundle.sh", bundle, "--code-only")
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_a_step_measures_what_its_lines_lack(scripts, tmp_path):
    """All cases but two were measured; the line of one of them is half-written, as a stopped process leaves it."""
    results, before, left = half_measured(scripts, tmp_path, "abc")
    given = argparse.Namespace(step="generation", results=results, tiny=True, limit=150.0, model=None, commit="abc")
    assert scripts["step"].run(given) == 0
    measured_what_was_left(results, before, left)


@pytest.mark.slow
def test_a_step_of_a_bundle_measures_what_its_lines_lack(scripts, bundle, tmp_path):
    results, before, left = half_measured(scripts, tmp_path, (bundle / "commit").read_text().strip())
    done = bash(bundle / "run.sh", "--tiny", "generation", OUT=tmp_path, PYTHON=sys.executable)
    log = (tmp_path / "logs/generation.log").read_text()
    assert done.returncode == 0 and "generation: done\n" in done.stdout, log
    lines = measured_what_was_left(results, before, left)
    again = bash(bundle / "run.sh", "--tiny", "generation", OUT=tmp_path, PYTHON="/bin/true")
    assert "generation: done before" in again.stdout and results.read_text().splitlines() == lines


def half_measured(scripts: dict[str, ModuleType], folder: Path, commit: str) -> tuple[Path, list[str], list[str]]:
    """A file of results, its whole lines, and the two cases that it lacks."""
    import torch

    cases = scripts["steps"].STEPS["generation"].cases
    left = [cases[0], next(case for case in cases if "generate" in case)]
    head = {"step": "generation", "card": "CPU", "torch": torch.__version__, "commit": commit}
    figures = [{"case": case, "tiny": True, "seconds": 1} for case in cases if case not in left]
    before = [json.dumps({**head, "figure": figure}) for figure in figures]
    (folder / "results.jsonl").write_text("\n".join([*before, json.dumps({**head, "figure": {}})[:40]]))
    return folder / "results.jsonl", before, left


def measured_what_was_left(results: Path, before: list[str], left: list[str]) -> list[str]:
    lines = results.read_text().splitlines()
    head = {key: value for key, value in json.loads(before[0]).items() if key != "figure"}
    assert lines[: len(before)] == before
    for line, case in zip(map(json.loads, lines[len(before) + 1 :]), left, strict=True):
        figure = line.pop("figure")
        assert line == head and figure["case"] == case and figure["tiny"]
        assert figure["answers"] == (3 if "generate" in case else 6)
    return lines


def stub(path: Path, code: int, says: str = "") -> Path:
    """A Python that writes down how it is called."""
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$@" >> {path}.calls\necho "{says}"\nexit {code}\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("code", "says", "words"),
    [
        (0, "", "nf4: done\n"),
        (0, "local: skipped, no base is here", "nf4: local: skipped, no base is here\n"),
        (75, "", "nf4: time is up; the same command goes on\n"),
        (124, "", "nf4: stopped after 150 seconds"),
        (1, "", "nf4: failed, see "),
    ],
)
def test_what_run_says_of_a_step_and_whether_it_is_done(tmp_path, code, says, words):
    python = stub(tmp_path / "python", code, says)
    done = bash(GPU / "run.sh", "--tiny", "nf4", OUT=tmp_path / "out", PYTHON=python)
    assert words in done.stdout and done.returncode == (0 if code == 0 else 1)
    assert (tmp_path / "out/logs/nf4.done").exists() == (words == "nf4: done\n")
    (call,) = Path(f"{python}.calls").read_text().splitlines()
    assert f"step.py nf4 --tiny --results {tmp_path}/out/results.jsonl --limit 135 --commit " in call


def test_run_goes_through_all_steps_in_order_of_worth(scripts, tmp_path):
    python = stub(tmp_path / "python", 0)
    assert bash(GPU / "run.sh", "--tiny", OUT=tmp_path / "out", PYTHON=python).returncode == 0
    called = [call.split()[1] for call in Path(f"{python}.calls").read_text().splitlines()]
    assert called == list(scripts["steps"].STEPS)
    assert all((GPU / f"step_{step}.py").is_file() for step in called)


@pytest.mark.parametrize(("words", "part"), [(["nf5"], "no step nf5; known: equality"), (["nf4"], "does not start")])
def test_run_refuses_what_it_does_not_know(tmp_path, words, part):
    done = bash(GPU / "run.sh", *words, OUT=tmp_path / "out", PYTHON=tmp_path / "nowhere" if "nf4" in words else "true")
    assert done.returncode == 2 and part in done.stderr and not (tmp_path / "out").exists()


def test_a_table_shows_the_latest_line_of_each_card_and_what_was_not_run(scripts):
    Line, steps = scripts["lines"].Line, scripts["steps"]
    lines = [
        Line(**HEAD, figure={"case": CASE, "seconds": 9.5}),
        Line(**HEAD, figure={"case": CASE, "seconds": 8.25, "tokens_per_second": 12345}),
        Line(**HEAD, figure={"case": CASE, "error": "out of memory"}),
        Line(**{**HEAD, "card": "Card 2"}, figure={"case": CASE, "seconds": 1}),
    ]
    head, _, *rows = scripts["table"].table(steps.STEPS["nf4"], lines).splitlines()
    assert head == "| case | seconds | useful tokens/s | base, GiB | peak GiB | card, torch, code |"
    assert rows == [
        f"| {CASE} | 8.25 | 12,345 |  |  | Card 1, 2.11, abc |",
        f"| {CASE} | 1 |  |  |  | Card 2, 2.11, abc |",
        "| not run: llama-3.2-3b, bf16; llama-3.2-3b, int8 |  |  |  |  |  |",
    ]


def test_the_page_is_what_the_kept_lines_say(scripts):
    table = scripts["table"]
    page = table.PAGE.read_text()
    assert table.written(page, list(scripts["lines"].read(table.KEPT))) == page
    assert all(f"<!-- figures of {step}, " in page for step in scripts["steps"].STEPS)


def test_new_lines_are_kept_once_and_tiny_ones_never(scripts, tmp_path, monkeypatch):
    page, kept, results = tmp_path / "page.md", tmp_path / "kept.jsonl", tmp_path / "results.jsonl"
    page.write_text("# Page\n\n<!-- figures of nf4, written -->\nold\n<!-- end -->\nbehind\n")
    figures = [{"case": CASE, "seconds": 2}, {"case": CASE, "tiny": True, "seconds": 3}, {"case": CASE, "error": "no"}]
    results.write_text("".join(json.dumps({**HEAD, "figure": figure}) + "\n" for figure in figures))
    words = ["table.py", str(results), "--write", "--kept", str(kept), "--page", str(page)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", words)
        scripts["table"].main()
    assert [json.loads(line)["figure"] for line in kept.read_text().splitlines()] == figures[:1]
    text = page.read_text()
    assert f"| {CASE} | 2 |  |  |  | Card 1, 2.11, abc |" in text and "old" not in text and text.endswith("\nbehind\n")


def test_a_damaged_line_is_named(scripts, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"step": "nf4"}\n')
    with pytest.raises(SystemExit, match="has not the keys of a figure"):
        list(scripts["lines"].read(path))
