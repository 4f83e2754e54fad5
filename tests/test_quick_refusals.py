"""A mistake in a configuration is named before anything is imported that takes seconds: the modules are looked at, not
the clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = str(Path(__file__).parents[1] / "scripts/train.py")
HEAVY = ["torch", "pyarrow", "transformers", "datasets", "accelerate", "peft", "evaluate", "matplotlib", "pandas"]
PROBE = f"""
import contextlib, io, json, runpy, sys
from llm_fed import cli

def imported():
    print(json.dumps([said, [name for name in {HEAVY!r} if name in sys.modules]]))
    said.clear()

said = []
for words in json.loads(sys.argv[1]):
    if words is None:
        imported()
        continue
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        try:
            if words[0].endswith(".py"):
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
            else:
                cli.main(words)
        except SystemExit as end:
            said.append([end.code, stream.getvalue()])
imported()
import llm_fed.experiment.run
imported()
"""
CONFIG = """
base: {name: nowhere/base}
task: {name: planted}
method: {name: fedmerge}
compare: {seeds: [0], rows: {plain: [method=fedmerge], steps: [local.steps=3]}}
"""
COMMANDS = (["run"], ["compare"], ["flower"], [TRAIN])


Cases = list[tuple[list[str], str]]  # words, and what is to be said


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> list[list[str]]:
    """The heavy modules that one process has imported when it has refused what needs none, when it has refused what
    needs torch, and when it has imported what trains."""
    folder = tmp_path_factory.mktemp("refused")
    light, with_torch = keys_values_and_paths(folder), names_and_settings_of_methods(folder)
    given = json.dumps([*(words for words, _ in light), None, *(words for words, _ in with_torch)])
    done = subprocess.run([sys.executable, "-c", PROBE, given], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    phases = [json.loads(line) for line in done.stdout.splitlines()]
    for cases, (said, _) in zip((light, with_torch, []), phases, strict=True):
        for (words, part), (code, message) in zip(cases, said, strict=True):
            assert code == 2 and part in message and message.count("\n") <= 2, (words, message)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []  # no run folder, and no app
    return [modules for _, modules in phases]


def test_keys_values_and_paths_need_nothing_heavy(imported):
    assert imported[0] == []


def test_names_and_settings_of_methods_need_torch_alone(imported):
    assert imported[1] == ["torch"]


def test_a_run_imports_pictures_and_tables_only_when_it_needs_them(imported):
    """It trains on examples that no file holds long before it draws a report."""
    assert not {"matplotlib", "pyarrow", "datasets", "pandas"} & set(imported[2])


def keys_values_and_paths(folder: Path) -> Cases:
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "row.yaml").write_text(CONFIG.replace("local.steps=3", "local.stepz=3"))
    mistakes = {
        "roundz=3": "unknown key roundz (the closest is 'rounds')",
        "local.learning_rate=1": "unknown key local.learning_rate",
        "task.partition.klasses=2": "unknown key task.partition.klasses (the closest is 'classes')",
        "local.lr=-1": "local.lr is -1.0; it must be above 0",
        "base.dtype=float99": "base.dtype='float99' is unknown",
        "eval.metric=rogue1": "eval.metric='rogue1' is unknown (the closest is 'rouge1')",
        "rounds": "settings look like",
    }
    cases = [([*command, "c.yaml", word], part) for command in COMMANDS for word, part in mistakes.items()]
    missing = ["c.yaml", "task.name=files", "task.path=data/clinics"]
    cases += [([*command, *missing], "there is no such file") for command in COMMANDS if command != ["flower"]]
    cases += [(["compare", "row.yaml"], "row 'steps': unknown key local.stepz (the closest is 'steps')")]
    cases += [(["compare", "c.yaml", "--seeds", "one"], "--seeds"), (["compare", "c.yaml", "seed=3"], "--seeds")]
    after = (["eval", "run"], ["eval", "--base", "b"], ["merge", "mean", "--fed", "a", "--local", "b", "--out", "c"])
    for command in after:
        cases += [([*command, "task.templat=chat"], "unknown key task.templat (the closest is 'template')")]
        cases += [([*command, "eval.limit=few"], "eval.limit is 'few'"), ([*command, "eval.limit=3", "x"], "got 'x'")]
    cases += [(["eval"], "give either a run folder"), (["eval", "run", "--base", "b"], "give either a run folder")]
    cases += [(["report", "nowhere"], "is not a run folder")]
    return cases


def names_and_settings_of_methods(folder: Path) -> Cases:
    (folder / "typo.yaml").write_text(CONFIG.replace("fedmerge", "fedmrge"))
    mistakes = {
        "method.num_model=3": "unknown key method.num_model (the closest is 'num_models')",
        "method.num_models=0": "method.num_models is 0",
        "task.name=plantd": "task.name='plantd' is unknown (the closest is 'planted')",
        "task.partition.kind=diriclet": "(the closest is 'dirichlet')",
    }
    cases = [([*command, "c.yaml", word], part) for command in COMMANDS for word, part in mistakes.items()]
    cases += [([*command, "typo.yaml"], "'fedmrge' is unknown (the closest is 'fedmerge')") for command in COMMANDS]
    cases += [(["compare", "c.yaml", "--methods", "fedmrg"], "no row or method 'fedmrg' (the closest is 'fedmerge')")]
    return cases
