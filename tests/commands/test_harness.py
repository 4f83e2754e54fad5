"""The harness on a run's models: the numbers of its own model of transformers with stock PEFT, on local tasks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_fed import commands

CHOICES = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWERS = """
task: written
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["w5"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture
def tasks(tmp_path) -> list[str]:
    """Three tasks of local files, of each kind of request one."""
    rows = [
        {"question": f"w{20 + n} w{21 + n}", "choices": ["w4 w5", "w7 w8", "w10 w11"], "label": n % 3, "answer": "w4"}
        for n in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in {"words": CHOICES, "written": ANSWERS, "texts": TEXTS}.items():
        (tmp_path / f"{name}.yaml").write_text(text % data)
    return [str(tmp_path / f"{name}.yaml") for name in ("words", "written", "texts")]


@pytest.fixture
def offline(monkeypatch, tmp_path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def stock(base: Path, adapter: Path | None, task: str, limit: int | None = None) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.models.huggingface import HFLM

    options = {"peft": str(adapter)} if adapter else {}
    model = HFLM(pretrained=str(base), device="cpu", dtype="float32", **options)
    wanted = EvaluatorConfig(tasks=[task])
    manager = wanted.process_tasks()
    (found,) = simple_evaluate(model=model, tasks=wanted.tasks, task_manager=manager, limit=limit)["results"].values()
    return {key: value for key, value in found.items() if isinstance(value, float)}


def test_the_numbers_are_those_of_stock_peft(finished, small, llm_fed, tasks, offline):
    said = llm_fed("eval", finished, "--harness", ",".join(tasks), "--json")
    assert said.code == 0, said.err[-2000:]
    found = json.loads(said.out)
    assert [*found] == ["base", "ada", "bob", "cyd"]
    assert all(found[name] != found["base"] for name in ("ada", "bob", "cyd"))
    for name, its in found.items():
        adapter = None if name == "base" else finished / "adapters" / name
        for task, path in zip(("words", "written", "texts"), tasks, strict=True):
            expected = stock(small.base, adapter, path)
            assert expected and {key: its[task][key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_a_table_with_a_row_for_each_model(finished, small, llm_fed, tasks, offline):
    said = llm_fed("eval", finished, "--harness", tasks[0], "--limit", "3")
    assert said.code == 0, said.err[-2000:]
    rows = [line for line in said.out.splitlines() if line.strip()[:4].strip("│ ┃|") in ("base", "ada", "bob", "cyd")]
    assert "words acc" in said.out and "words acc_norm" in said.out
    for name in ("base", "ada", "bob", "cyd"):
        assert name in said.out
    expected = stock(small.base, finished / "adapters/bob", tasks[0], 3)["acc,none"]
    assert f"{expected:.4f} ±" in next(line for line in said.out.splitlines() if "bob" in line), rows


def test_requests_one_by_one(finished, small, offline):
    """Log-likelihoods with whether they are greedy, whole texts, and answers with a length and a stop of their own."""
    from lm_eval.models.huggingface import HFLM

    from llm_fed.harness import LM, Models

    models = Models(finished)
    mine = LM(models, "bob", batch_size=3)
    theirs = HFLM(pretrained=str(small.base), peft=str(finished / "adapters/bob"), device="cpu", dtype="float32")
    asked = [SimpleNamespace(args=pair) for pair in (("w20 w21", " w7 w8"), ("w20", " w7"), ("", "w7 w8 w9"))]
    for one, other in zip(mine.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one == (pytest.approx(other[0], rel=1e-5), other[1])
    texts = [
        SimpleNamespace(args=("w20 w21 w22 " * 30,)),
        SimpleNamespace(args=("w3",)),
    ]  # the first beyond the context
    assert mine.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-5)
    written = [
        SimpleNamespace(args=("w20 w21", {"until": ["w8"], "max_gen_toks": 5})),
        SimpleNamespace(args=("w22 w23 w24", {"until": [], "max_gen_toks": 3})),
    ]
    assert mine.generate_until(written) == theirs.generate_until(written)
    assert mine.loglikelihood(asked) != LM(models).loglikelihood(asked)  # the base


def test_the_harness_finds_them_by_name(finished, offline):
    from lm_eval.api.registry import get_model

    from llm_fed.harness import LM

    assert get_model("llm_fed") is LM
    made = get_model("llm_fed").create_from_arg_string(f"run={finished},client=cyd", {"batch_size": 2, "device": "cpu"})
    assert made.batch_size == 2


def test_what_is_refused(finished, llm_fed, tasks, tmp_path, monkeypatch):
    llm_fed("eval", finished, "--harness", tasks[0], "--cross").assert_refused("--cross", "bring their own data")
    llm_fed("eval", finished, "task.noise=0.1", "--harness", tasks[0]).assert_refused("settings")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "llm_fed.commands.harness", raising=False)
    monkeypatch.delattr(commands, "harness", raising=False)
    llm_fed("eval", finished, "--harness", tasks[0]).assert_refused("lm-evaluation-harness", ".[harness]")


def test_a_task_that_is_not_there(finished, llm_fed, offline):
    llm_fed("eval", finished, "--harness", "no_such_task").assert_refused("no_such_task")
