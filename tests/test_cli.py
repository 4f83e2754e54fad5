"""The command line: what each command prints where, its exit codes, and its frozen list of flags."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from llm_fed import cli, methods, tasks
from llm_fed.runs.records import read_records

REPOSITORY = Path(__file__).parents[1]
FLAGS = {
    "run": [
        "config", "settings", "--out", "--fresh", "--from", "--dry-run", "--show", "--finish", "--continue", "--json",
    ],
    "quickstart": ["--out", "--seed"],
    "join": ["run_dir", "--data", "--out", "settings", "--examples", "--steps", "--allow", "--json"],
    "eval": [
        "run_dir", "settings", "--split", "--base", "--adapter", "--task", "--data", "--metric", "--template",
        "--dtype", "--limit", "--cross", "--allow", "--json",
    ],
    "compare": [
        "config", "settings", "--methods", "--seeds", "--draws", "--runs", "--out", "--jobs", "--dry-run", "--allow",
        "--json",
    ],
    "verdict": ["scores", "--drawn", "--test-share", "--these-clients", "--out", "--json"],
    "merge": [
        "words", "--out", "--method", "--weights", "--rank", "--density", "--drop", "--fed", "--local", "--task",
        "--data", "--client", "--base", "--template", "--dtype", "--allow", "--json",
    ],
    "init": [
        "data", "--out", "--base", "--prompt", "--input", "--answer", "--client", "--clients", "--method",
        "--yes", "-y", "--force",
    ],
    "report": ["run_dir"],
    "audit": ["run_dir", "--rounds", "--sample", "--all", "--allow", "--json"],
    "forget": ["run_dir", "--client", "--yes", "-y", "--allow"],
    "chat": [
        "run_dir", "--client", "--base", "--adapter", "--template", "--dtype", "--max-new-tokens", "--sampling",
        "--system", "--allow",
    ],
    "export": ["run_dir", "out_dir", "--client", "--merged", "--gguf", "--allow"],
    "push": [
        "run_dir", "namespace", "--client", "--private", "--license", "--prefix", "--one-repository", "--dry-run",
        "--allow",
    ],
    "flower": ["config", "settings", "--out"],
    "serve": ["runs", "--port", "--host", "--api-key", "--queue", "--allow"],
    "publish": ["run_dir", "--vllm", "--out", "--api-key", "--allow"],
    "methods": ["--json"],
    "runs": ["--json"],
    "tasks": ["--json"],
    "doctor": ["--base", "--json"],
}  # fmt: skip
LARGE = [  # what no help needs
    "torch", "transformers", "datasets", "peft", "accelerate", "bitsandbytes", "evaluate", "flwr", "httpx",
    "huggingface_hub", "matplotlib", "numpy", "pandas", "pyarrow", "PIL", "rouge_score", "jinja2", "omegaconf",
    "pydantic",
]  # fmt: skip
KEYS = ["metric", "clients", "mean", "std", "worst_half", "loss", "losses"]


def test_flags_are_frozen():
    """Scripts depend on these. Whoever changes one says so in CHANGELOG.md and here."""
    commands: dict[str, Any] = vars(typer.main.get_command(cli.app))["commands"]
    found = {name: [flag for param in command.params for flag in param.opts] for name, command in commands.items()}
    changed = [
        f"{name}: {flag} is {'new' if flag in found.get(name, []) else 'gone'}"
        for name in {**FLAGS, **found}
        for flag in sorted({*FLAGS.get(name, []), *found.get(name, [])})
        if (flag in FLAGS.get(name, [])) != (flag in found.get(name, []))
    ]
    assert not changed
    assert found == FLAGS


def test_run_with_words_and_the_default_folder(small, llm_fed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small.as_usual().config(tmp_path / "mine.yaml")
    said = llm_fed("run", "mine.yaml", "rounds=1", "local.lr=1e-2", "method=local", "seed=3")
    assert said.code == 0
    assert "runs/mine-local-seed3" in said.out and "ada" in said.out
    assert "round 1/1: loss" in said.err and "\x1b" not in said.err  # plain lines where there is no terminal
    folder = tmp_path / "runs/mine-local-seed3"
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "adapters", "checkpoints", "config.yaml", "delivered.json", "digests.jsonl", "environment.json", "inputs.json",
        "metrics.jsonl", "report.html", "samples.jsonl", "splits.json", "summary.json", "timing.jsonl",
        "test_scores.jsonl", "cross.json", "warnings.json",
    }  # fmt: skip

    before = (folder / "metrics.jsonl").read_bytes()
    again = llm_fed("run", "mine.yaml", "rounds=1", "local.lr=1e-2", "method=local", "seed=3")
    assert again.code == 0 and again.out == said.out
    assert "is complete: 1 rounds; --fresh starts again" in again.err and "loss" not in again.err
    fresh = llm_fed("run", "mine.yaml", "rounds=1", "local.lr=1e-2", "method=local", "seed=3", "--fresh")
    assert fresh.code == 0 and "round 1/1: loss" in fresh.err
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_out_and_another_configuration_in_it(small, llm_fed, tmp_path):
    config = small.config(tmp_path / "c.yaml", rounds=1)
    assert llm_fed("run", config, "--out", tmp_path / "here").code == 0
    refused = llm_fed("run", config, "local.steps=1", "--out", tmp_path / "here")
    assert (refused.code, refused.out) == (2, "")
    assert "holds a run of another configuration (local.steps: 2 -> 1)" in refused.err
    fresh = llm_fed("run", config, "local.steps=1", "--out", tmp_path / "here", "--fresh")
    assert fresh.code == 0 and "round 1/1: loss" in fresh.err


def test_late_answers_by_configuration(small, llm_fed, tmp_path):
    """Half-normal delays and drop-outs reach the run, and the arrivals are the same for another method."""
    config = small.config(tmp_path / "c.yaml", rounds=6, delay={"sigma": 1.0, "drop_out": 0.5})
    seen = []
    for method in ("fedit", "fedasync"):
        assert llm_fed("run", config, f"method={method}", "--out", tmp_path / method).code == 0
        lines = read_records(tmp_path / method / "metrics.jsonl")
        asked = [line for line in lines if line["kind"] in ("client", "drop-out")]
        seen.append([(line["round"], line["client"], line.get("staleness")) for line in asked])
    assert seen[0] == seen[1]
    delays = [late for *_, late in seen[0]]
    assert None in delays and max(late for late in delays if late is not None) >= 2
    assert len({round for round, *_ in seen[0]}) < 6  # in some round everybody was at work


def test_eval_of_a_run_gives_the_runs_own_scores(llm_fed, finished):
    scores = json.loads((finished / "summary.json").read_text())["scores"]
    said = llm_fed("eval", finished, "--json")
    assert said.code == 0
    result = json.loads(said.out)  # one object alone
    assert list(result) == [*KEYS, "base", "rule", "warnings"]
    known = json.loads((finished / "summary.json").read_text())
    assert (result["base"], result["rule"]) == (known["base"], known["rule"])
    assert {key: result[key] for key in KEYS} == {key: scores[key] for key in KEYS}
    assert all(0 <= value <= 100 for value in result["clients"].values()) and result["mean"] > 0
    table = llm_fed("eval", finished)
    assert table.code == 0 and "rouge1 (0-100)" in table.out and f"{result['mean']:.1f}" in table.out
    head = next(line for line in table.out.splitlines() if "client" in line)
    assert head.index("base") < head.index("rule") < head.index("fedmerge")


def test_eval_of_the_validation_split_with_another_metric(llm_fed, finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    tested = json.loads((finished / "summary.json").read_text())["round"]
    (score,) = [line for line in lines if line.get("split") == "validation" and line["round"] == tested]
    said = llm_fed("eval", finished, "--split", "validation", "--json")
    result = json.loads(said.out)
    assert {key: result[key] for key in KEYS} == {key: score[key] for key in KEYS}
    assert result["base"]["metric"] == result["rule"]["metric"] == "rouge1" and result["rule"]["split"] == "validation"
    alone = json.loads(llm_fed("eval", finished, "--split", "validation", "eval.base=false", "--json").out)
    assert alone["base"] is None and alone["rule"] == result["rule"]
    exact = json.loads(llm_fed("eval", finished, "--metric", "exact_match", "--limit", "1", "--json").out)
    assert exact["metric"] == "exact_match" and set(exact["clients"].values()) <= {0.0, 100.0}


def test_eval_of_one_adapter_on_a_task_and_on_a_file(llm_fed, small, finished, monkeypatch):
    """Client ada's adapter on ada's test file scores what the run says; on the whole task it scores every client."""
    run = json.loads(llm_fed("eval", finished, "--json").out)
    one = ["eval", "--base", small.base, "--adapter", finished / "adapters/ada", "--template", "plain", "--json"]
    on_file = json.loads(llm_fed(*one, "--data", small.data / "ada/test.jsonl").out)
    assert on_file["clients"] == {"test": run["clients"]["ada"]} and list(on_file) == KEYS
    on_task = json.loads(llm_fed(*one, "--task", "files", "--data", small.data).out)
    assert list(on_task["clients"]) == ["ada", "bob", "cyd"] and on_task["clients"]["ada"] == run["clients"]["ada"]


def test_export_of_all_and_of_one(llm_fed, small, finished, tmp_path):
    said = llm_fed("export", finished, tmp_path / "all")
    assert said.code == 0
    assert said.out.split() == [str(tmp_path / "all" / client) for client in ("ada", "bob", "cyd")]
    said = llm_fed("export", finished, tmp_path / "one", "--client", "bob", "--client", "ada")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["ada", "bob"]
    again = llm_fed("export", finished, tmp_path / "one", "--client", "bob")  # replaces what it wrote before
    assert again.code == 0
    for path in (tmp_path / "all/bob").iterdir():
        assert path.read_bytes() == (tmp_path / "one/bob" / path.name).read_bytes()

    plain = AutoModelForCausalLM.from_pretrained(small.base)
    ids = torch.tensor([[20, 21, 22]])
    before = plain(ids).logits
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "all/bob")
    assert (adapted(ids).logits - before).abs().max() > 0.1
    card = (tmp_path / "all/bob/README.md").read_text()
    assert "fedmerge" in card and "Chen et al. 2026" in card and "num_models: 2" in card


def test_export_knows_a_client_from_what_a_killed_export_left(llm_fed, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run/adapters/ada").rename(tmp_path / "run/adapters/.ada")  # a client id may begin with a dot
    shutil.copytree(tmp_path / "run/adapters/bob", tmp_path / "run/adapters/.bob.partial")
    assert llm_fed("export", tmp_path / "run", tmp_path / "out").code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".ada", "bob", "cyd"]


def test_methods_and_tasks(llm_fed):
    for command, table in (("methods", methods.BUILTIN), ("tasks", tasks.TASKS)):
        listed = json.loads(llm_fed(command, "--json").out)
        assert [entry["name"] for entry in listed] == list(table)
        text = llm_fed(command)
        assert text.code == 0 and all(name in text.out for name in table)
    assert "num_models=8" in llm_fed("methods").out


def test_doctor(llm_fed, monkeypatch):
    findings = [{"what": "disk", "found": "[red]1 GiB", "ok": True}, {"what": "nf4", "found": "no kernel", "ok": False}]
    monkeypatch.setattr("llm_fed.commands.doctor.examine", lambda: findings)
    said = llm_fed("doctor")
    assert said.code == 1 and said.out == "ok   disk: [red]1 GiB\nFAIL nf4: no kernel\n"
    assert len(said.err.splitlines()) == 1 and "FAIL" in said.err
    assert json.loads(llm_fed("doctor", "--json").out) == findings


def test_doctor_examines_this_machine(llm_fed):
    said = llm_fed("doctor", "--json")
    findings = json.loads(said.out)
    assert said.code == 0, findings
    assert {"device", "libraries", "memory and disk"} < {finding["what"] for finding in findings}


@pytest.mark.parametrize(
    "words, message",
    [
        (["run"], "config"),
        (["run", "c.yaml", "--fersh"], "--fersh"),
        (["rnu", "c.yaml"], "rnu"),
        (["eval", "run", "--limit", "many"], "--limit"),
    ],
)
def test_wrong_words_end_in_two_lines(llm_fed, words, message):
    said = llm_fed(*words)
    assert (said.code, said.out) == (2, "")
    assert message in said.err.lower() and "--help" in said.err
    assert len(said.err.splitlines()) <= 2 and said.err.startswith("llm-fed: ")


def test_help(llm_fed):
    for words in ([], ["--help"], ["-h"], ["run", "--help"]):
        said = llm_fed(*words)
        assert said.code == (0 if words else 2)
        assert "Usage: llm-fed" in said.out + said.err


def test_interrupted_says_how_to_go_on(llm_fed, small, tmp_path, monkeypatch, recwarn):
    """And nothing else but the plan, such as a warning of the clients whose turn it was not yet."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("llm_fed.engine.fit.FusedFit.step", interrupt)
    config = small.as_usual().config(tmp_path / "c.yaml", clients_per_pass=1)
    said = llm_fed("run", config, "--out", tmp_path / "run")
    assert said.code == 130
    plan, message = said.err.rsplit("llm-fed: ", 1)
    assert message == "interrupted; give the same command again to continue from the last checkpoint\n"
    assert plan.startswith("method ") and "\nscores " in plan and "round 0 (the base alone)" in plan.splitlines()[-1]
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_the_installed_command_and_the_module():
    for command in ([Path(sys.executable).parent / "llm-fed"], [sys.executable, "-m", "llm_fed.cli"]):
        done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
        assert all(name in done.stdout for name in FLAGS)


def test_no_help_loads_a_library_that_only_its_command_uses():
    """All commands in one process: what one of them imports is seen at the end."""
    code = f"""import sys
from llm_fed.cli import main
for command in {sorted(FLAGS)}:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code, command
print({set(LARGE)} & sys.modules.keys())"""
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.endswith("set()\n"), said.splitlines()[-1]


@pytest.mark.slow
def test_accelerate_launch_does_what_run_does(small, tmp_path):
    config = small.config(tmp_path / "c.yaml", rounds=1)
    done = launch(config, "method=local", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "round 1/1: loss" in done.stderr and str(tmp_path / "run") in done.stdout
    assert (tmp_path / "run/summary.json").exists()


def launch(*words: object) -> subprocess.CompletedProcess[str]:
    command = [
        Path(sys.executable).parent / "accelerate", "launch", "--config_file", REPOSITORY / "accelerate_config.yaml",
        REPOSITORY / "scripts/train.py", *words,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
