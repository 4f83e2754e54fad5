"""A mistake in a configuration is named before anything is imported that takes seconds: the modules are looked at, not
the clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TRAIN = str(Path(__file__).parents[1] / "scripts/train.py")
HEAVY = ["torch", "transformers", "datasets", "accelerate", "peft", "evaluate", "matplotlib", "pandas"]
PROBE = f"""
import contextlib, io, json, runpy, sys
from llm_fed import cli

said = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        try:
            if words[0].endswith(".py"):
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
            else:
                cli.main(words)
        except SystemExit as end:
            said.append([end.code, stream.getvalue()])
print(json.dumps([said, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
CONFIG = """
base: {name: nowhere/base}
task: {name: planted}
method: {name: fedmerge}
compare: {seeds: [0], rows: {plain: [method=fedmerge], steps: [local.steps=3]}}
"""
COMMANDS = (["run"], ["compare"], ["flower"], [TRAIN])


def imported_to_refuse(folder: Path, cases: list[tuple[list[str], str]]) -> list[str]:
    """The heavy modules that one process has imported when it has refused all cases: (words, what is to be said)."""
    given = json.dumps([words for words, _ in cases])
    done = subprocess.run([sys.executable, "-c", PROBE, given], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, modules = json.loads(done.stdout)
    for (words, part), (code, message) in zip(cases, said, strict=True):
        assert code == 2 and part in message and message.count("\n") <= 2, (words, message)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []  # no run folder, and no app
    return modules


def test_keys_values_and_paths_need_nothing_heavy(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "row.yaml").write_text(CONFIG.replace("local.steps=3", "local.stepz=3"))
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
    assert imported_to_refuse(tmp_path, cases) == []


def test_names_and_settings_of_methods_need_torch_alone(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "typo.yaml").write_text(CONFIG.replace("fedmerge", "fedmrge"))
    mistakes = {
        "method.num_model=3": "unknown key method.num_model (the closest is 'num_models')",
        "method.num_models=0": "method.num_models is 0",
        "task.name=plantd": "task.name='plantd' is unknown (the closest is 'planted')",
        "task.partition.kind=diriclet": "(the closest is 'dirichlet')",
    }
    cases = [([*command, "c.yaml", word], part) for command in COMMANDS for word, part in mistakes.items()]
    cases += [([*command, "typo.yaml"], "'fedmrge' is unknown (the closest is 'fedmerge')") for command in COMMANDS]
    cases += [(["compare", "c.yaml", "--methods", "fedmrg"], "no row or method 'fedmrg' (the closest is 'fedmerge')")]
    assert imported_to_refuse(tmp_path, cases) == ["torch"]


def test_a_run_imports_pictures_and_tables_only_when_it_needs_them():
    """It trains on examples that no file holds long before it draws a report."""
    code = "import sys, llm_fed.experiment.run; print({'matplotlib', 'pyarrow', 'datasets', 'pandas'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
