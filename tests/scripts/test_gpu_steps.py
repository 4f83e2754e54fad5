"""The steps of scripts/gpu, with tiny shapes on a CPU: each works, what was cut off comes last, and training is
measured as a run trains."""

from __future__ import annotations

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
    "rounding": ("llama-3.2-3b",),
    "training": (
        "products", "llama-3.2-3b, 8 clients", "llama-3.2-3b, 8 clients, 20 steps, cold",
        "llama-3.2-3b, 8 clients, all replayed",
        "llama-3.2-3b, 8 clients, one adapter on dense rows",
        "llama-3.2-3b, 8 clients, stock PEFT, one client after another", "llama-3.2-3b, 8 clients, one adapter for all",
        "llama-3.2-3b, 8 clients, in rows, all replayed",
        "llama-3.2-3b, 8 clients, one client after another, all replayed",
        "llama-3.1-8b, 8 clients, all-linear r=16, dropout, all replayed",
        "smollm2-135m, 8 clients, 20 steps",
    ),
    "families": ("llama, nf4", "llama, device_map=auto", "gemma3_text, window"),
    "nf4": ("llama-3.2-3b, int8",),
    "profile": ("llama-3.2-3b, 8 clients", "llama-3.2-3b, 8 clients, as written"),
}  # fmt: skip


@pytest.fixture
def scripts(monkeypatch) -> dict[str, ModuleType]:
    return modules(monkeypatch, "step", "steps", "lines")


@pytest.fixture
def run(scripts, tmp_path) -> Callable[..., int]:
    """A step with tiny shapes, and results in `tmp_path`."""

    def call(step: str, **options: object) -> int:
        given: dict[str, object] = {"limit": 150.0, "model": None, "commit": "abc", "cut_off": "last", **options}
        results = tmp_path / "results.jsonl"
        return scripts["step"].run(argparse.Namespace(step=step, results=results, tiny=True, **given))

    return call


def half_measured(scripts: dict[str, ModuleType], folder: Path, step: str, left: tuple[str, ...]) -> list[str]:
    """A file of results of all cases but those that are left, and at its end a half-written line; the whole ones."""
    import torch

    head = {"step": step, "card": "CPU", "torch": torch.__version__, "commit": "abc"}
    cases = [case for case in scripts["steps"].STEPS[step].cases if case not in left]
    whole = [json.dumps({**head, "figure": {"case": case, "tiny": True, "seconds": 1}}) for case in cases]
    (folder / "results.jsonl").write_text("\n".join([*whole, json.dumps({**head, "figure": {}})[:40]]))
    return whole


def figures(folder: Path, behind: int) -> dict[str, dict[str, object]]:
    """By case, of the lines behind so many whole ones and a half-written one."""
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines()[behind + 1 :])
    return {line["figure"]["case"]: line["figure"] for line in lines}


def test_a_step_measures_what_its_lines_lack(scripts, run, tmp_path):
    left = ("smollm2-135m, ours", "smollm2-135m, `generate`, one client after another")
    before = half_measured(scripts, tmp_path, "generation", left)
    assert run("generation") == 0
    assert (tmp_path / "results.jsonl").read_text().splitlines()[: len(before)] == before
    found = figures(tmp_path, len(before))
    assert tuple(found) == left and [figure["answers"] for figure in found.values()] == [6, 3]


@pytest.mark.parametrize("step", CHOSEN)
def test_each_step_measures_its_cases(scripts, run, tmp_path, step):
    """Nothing is left over from one case to the next, and each figure says with which libraries it was measured."""
    before = half_measured(scripts, tmp_path, step, CHOSEN[step])
    assert run(step) == 0, (tmp_path / "results.jsonl").read_text()
    found, columns = figures(tmp_path, len(before)), set(scripts["steps"].STEPS[step].columns)
    assert sorted(found) == sorted(CHOSEN[step])
    for case, figure in found.items():
        assert figure["tiny"] and figure["transformers"] and figure["liger"] and "error" not in figure
        assert columns & figure.keys(), case
        if "all replayed" in case or "dense" in case:
            assert figure["replayed"] == figure["micro_batches"] > 0, case
        if case.endswith((" clients", "20 steps")) and step == "training":
            assert figure["warm_up"] == figure["rounds"] == 2, case
    assert run(step) == 0 and figures(tmp_path, len(before)) == found


def test_a_run_is_measured_with_new_examples_and_its_own_captures(scripts, monkeypatch):
    """Two rounds that do not count, and two that do; of `all replayed` alone shapes are captured sooner."""
    setting, capture = importlib.import_module("setting"), importlib.import_module("llm_fed.engine.capture")
    uses = 7
    monkeypatch.setattr(capture, "USES", uses)  # whatever a run has
    training = importlib.reload(importlib.import_module("step_training"))
    seen, trained = [], training.trained

    def noted(model, jobs):
        batches = [job.batch(step) for job in jobs for step in range(len(job.batches))]
        seen.append((capture.USES, [tuple(example.input_ids) for batch in batches for example in batch]))
        return trained(model, jobs)

    monkeypatch.setattr(training, "trained", noted)
    small = setting.setting_of(tiny=True, scratch=Path("nowhere"), model=None)
    cases = training.measures(small)
    cases["llama-3.2-3b, 8 clients"]()
    assert [count for count, _ in seen] == [uses] * 4
    assert len({text for _, texts in seen for text in texts}) == sum(len(texts) for _, texts in seen)
    seen.clear()
    cases["llama-3.2-3b, 8 clients, all replayed"]()
    assert [count for count, _ in seen][:2] == [1, 1] and uses == capture.USES
    assert all(texts == seen[0][1] for _, texts in seen)


def test_families_are_timed_when_all_is_captured(scripts, monkeypatch, tmp_path):
    families, setting = importlib.import_module("step_families"), importlib.import_module("setting")
    graphs, timing, captured = importlib.import_module("llm_fed.engine.capture").Graphs, [False], list[bool]()
    once, kept = setting.Setting.once, graphs.capture

    def timed(self, run):
        timing.append(True)
        try:
            return once(self, run)
        finally:
            timing.pop()

    monkeypatch.setattr(setting.Setting, "once", timed)
    monkeypatch.setattr(graphs, "capture", lambda self, run: captured.append(timing[-1]) or kept(self, run))
    figure = families.measured(setting.setting_of(tiny=True, scratch=tmp_path, model=None), "llama, fp32")
    assert figure["replayed"] and captured and not any(captured)


def test_memory_is_that_of_a_case_with_what_graphs_keep(scripts, monkeypatch, tmp_path):
    """What torch has kept of the case before is given back first, and would count as reserved otherwise."""
    setting, said = importlib.import_module("setting"), list[str]()
    for name, value in {"max_memory_allocated": 2 * 2**30, "max_memory_reserved": 3 * 2**30}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda name=name: said.append(name))
    card = setting.Setting(setting.torch.device("cuda"), "Card", tiny=False, scratch=tmp_path, model=None)
    assert card.with_peak(lambda: {"seconds": len(said)}) == {"seconds": 2, "peak_gib": 2.0, "reserved_gib": 3.0}
    assert said == ["empty_cache", "reset_peak_memory_stats"]


def test_what_was_cut_off_comes_last(scripts, run, monkeypatch, tmp_path, capsys):
    """The first of three cases takes too long for the limit, in the first call and in the second."""
    first, *others = scripts["steps"].STEPS["nf4"].cases
    done: list[str] = []

    def measure(case: str) -> dict[str, int]:
        if case == first and len(done) < 3:
            raise KeyboardInterrupt  # as a process ends that is stopped: it writes no line
        done.append(case)
        return {"seconds": 1}

    its = {case: lambda case=case: measure(case) for case in (first, *others)}
    monkeypatch.setattr(importlib.import_module("step_nf4"), "measures", lambda setting: its)
    for had in ([], others):
        with pytest.raises(KeyboardInterrupt):
            run("nf4")
        assert done == had
    assert run("nf4", cut_off="leave") == 0 and done == others
    assert f"{first}: cut off before, so it comes after all other steps" in capsys.readouterr().out
    done.append("now it is quick enough")
    assert run("nf4", cut_off="only") == 0 and done[3:] == [first]
    lines = [json.loads(line)["figure"]["begun"] for line in (tmp_path / "begun.jsonl").read_text().splitlines()]
    assert lines == [1, 1, -1, 1, -1, 1, 1, -1]


def test_a_case_that_fails_was_not_cut_off(scripts, run, monkeypatch, tmp_path):
    def failing() -> dict[str, int]:
        raise RuntimeError("no")

    its = {case: failing for case in scripts["steps"].STEPS["nf4"].cases}
    monkeypatch.setattr(importlib.import_module("step_nf4"), "measures", lambda setting: its)
    for _ in range(2):
        assert run("nf4", cut_off="leave") == 1
    assert (tmp_path / "results.jsonl").read_text().count("RuntimeError: no") == 2 * len(its)


def test_a_test_that_passed_before_the_step_was_stopped_does_not_run_again(monkeypatch, tmp_path):
    """The log of a step that was stopped in its third test; of another commit nothing counts."""
    equality = modules(monkeypatch, "step_equality")["step_equality"]
    log, file = tmp_path / "scratch/equality.log", "tests/engine/test_on_device.py"
    assert equality.passed_before(log, "abc, CPU\n") == [] and log.read_text() == "abc, CPU\n"
    log.write_text(
        f"abc, CPU\n{file}::test_one[x y] PASSED [ 10%]\n{file}::test_two FAILED [ 20%]\n{file}::test_three "
    )
    assert equality.passed_before(log, "abc, CPU\n") == [f"{file}::test_one[x y]"]
    assert equality.passed_before(log, "abd, CPU\n") == [] and log.read_text() == "abd, CPU\n"
