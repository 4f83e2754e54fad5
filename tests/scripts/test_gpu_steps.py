"""The steps of scripts/gpu, with tiny shapes on a CPU: each works, and what was cut off comes last."""

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from gpu_scripts import modules

# Of each step what differs in its code; `make long` runs all cases of all steps, from a bundle.
CHOSEN = {
    "training": (
        "llama-3.2-3b, 8 clients", "llama-3.2-3b, 8 clients, all replayed", "llama-3.2-3b, 8 clients, int8",
        "llama-3.2-3b, 8 clients, one adapter on dense rows", "llama-3.2-3b, 8 clients, dropout",
        "llama-3.2-3b, 8 clients, stock PEFT, one client after another",
        "llama-3.2-3b, 8 clients, one client after another, all replayed",
    ),
    "large": ("llama-3.1-8b, 8 clients, all-linear r=16, all replayed",),
    "families": ("llama, nf4", "gemma3_text, window"),
    "generation": ("smollm2-135m, ours", "smollm2-135m, `generate`, one client after another"),
}  # fmt: skip


@pytest.fixture
def scripts(monkeypatch) -> dict[str, ModuleType]:
    return modules(monkeypatch, "step", "steps", "lines")


@pytest.fixture
def run(scripts, tmp_path) -> Callable[..., int]:
    """A step with tiny shapes, and results in `tmp_path`."""

    def call(step: str, **options: object) -> int:
        given: dict[str, object] = {"limit": 100.0, "model": None, "commit": "abc", **options}
        results = tmp_path / "results.jsonl"
        return scripts["step"].run(argparse.Namespace(step=step, results=results, tiny=True, **given))

    return call


def head(step: str) -> dict[str, str]:
    import torch

    return {"step": step, "card": "CPU", "torch": torch.__version__, "commit": "abc"}


def half_measured(scripts: dict[str, ModuleType], folder: Path, step: str, left: tuple[str, ...]) -> list[str]:
    """A file of results of all cases but those that are left, and at its end a half-written line; the whole ones."""
    cases = [case for case in scripts["steps"].STEPS[step].cases if case not in left]
    whole = [json.dumps({**head(step), "figure": {"case": case, "tiny": True, "seconds": 1}}) for case in cases]
    (folder / "results.jsonl").write_text("\n".join([*whole, json.dumps({**head(step), "figure": {}})[:40]]))
    return whole


def figures(folder: Path, behind: int) -> dict[str, dict[str, object]]:
    """By case, of the lines behind so many whole ones and a half-written one."""
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines()[behind + 1 :])
    return {line["figure"]["case"]: line["figure"] for line in lines}


@pytest.mark.parametrize("step", CHOSEN)
def test_each_step_measures_what_its_lines_lack(scripts, run, tmp_path, step):
    """Nothing is left over from one case to the next, and each figure says with which libraries it was measured."""
    before = half_measured(scripts, tmp_path, step, CHOSEN[step])
    assert run(step) == 0, (tmp_path / "results.jsonl").read_text()
    assert (tmp_path / "results.jsonl").read_text().splitlines()[: len(before)] == before
    found, columns = figures(tmp_path, len(before)), set(scripts["steps"].STEPS[step].columns)
    assert sorted(found) == sorted(CHOSEN[step])
    for case, figure in found.items():
        assert figure["tiny"] and figure["transformers"] and figure["liger"] and not figure.keys() & {"error", "begun"}
        assert columns & figure.keys(), case
        if "all replayed" in case or "dense" in case:
            assert figure["replayed"] == figure["micro_batches"] > 0, case
    assert run(step) == 0 and figures(tmp_path, len(before)) == found


def test_what_was_cut_off_comes_last_and_what_failed_is_tried_again(scripts, run, tmp_path, monkeypatch):
    cases = scripts["steps"].STEPS["start"].cases
    cut = {**head("start"), "figure": {"case": cases[0], "tiny": True, "begun": 1}}
    (tmp_path / "results.jsonl").write_text(json.dumps(cut) + "\n")
    monkeypatch.syspath_prepend(str(Path(scripts["step"].__file__).parents[1] / "bench"))
    start, seen = importlib.import_module("step_start"), []

    def measured(case: str) -> dict[str, object]:
        seen.append(case)
        if len(seen) == 1:
            raise ValueError("once")
        return {"seconds": 1}

    monkeypatch.setattr(start, "measures", lambda setting: measured)
    assert run("start") == 1 and seen == [cases[1], cases[0]]
    assert run("start") == 0 and seen == [cases[1], cases[0], cases[1]]


def test_without_a_base_the_start_is_skipped(scripts, run, tmp_path):
    """The evidence needs one, and data."""
    assert run("evidence") == 0 and not any(
        line.is_measured for line in scripts["lines"].read(tmp_path / "results.jsonl")
    )
