"""`eval.base`: the base without any adapter is scored as round 0 and on the test split, which shows what training
brought."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_fed.bench import build
from llm_fed.commands import compare, section
from llm_fed.experiment import run as experiment
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.scoring.scores import Summary, score
from llm_fed.settings.configfile import from_dict

METHODS = ("ffa", "pfedmoe", "feddpa")


def tree(small, **changes: Any) -> dict[str, Any]:
    changes["eval"] = {"base": True, "cross": False} | changes.get("eval", {})
    return small.tree(**{"rounds": 2, **changes})


def lines(run: Path) -> list[dict[str, Any]]:
    return read_records(run / "metrics.jsonl")


def scores(run: Path) -> list[tuple[int, str]]:
    return [(line["round"], line["split"]) for line in lines(run) if line["kind"] == "score"]


def answers_of_the_base(small, split: str) -> dict[str, float]:
    """Each client's score under the model alone, by transformers' own generation."""
    tokenizer = AutoTokenizer.from_pretrained(small.base)
    model = AutoModelForCausalLM.from_pretrained(small.base).eval()
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=3, eos_token_id=1, pad_token_id=0)
    found = {}
    for folder in sorted(small.data.iterdir()):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        texts = []
        for row in rows:
            given = tokenizer(row["instruction"] + "\n", return_tensors="pt")["input_ids"]
            output = model.generate(input_ids=given)[0, given.shape[1] :].tolist()
            texts.append(tokenizer.decode([token for token in output if token != 1]).strip())
        found[folder.name] = score("rouge1", texts, [(row["output"],) for row in rows])
    return found


def echoing(small, folder: Path) -> Path:
    """Clients whose right answers are what the base says anyway, so that its scores are not zero."""
    tokenizer, model = AutoTokenizer.from_pretrained(small.base), AutoModelForCausalLM.from_pretrained(small.base)
    shutil.copytree(small.data, folder)
    for path in folder.glob("*/*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        ids = tokenizer(rows[0]["instruction"] + "\n", return_tensors="pt")["input_ids"]
        first = tokenizer.decode([int(model(ids).logits[0, -1].argmax())])
        path.write_text("".join(json.dumps(row | {"output": f"{first} {row['output']}"}) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_round_0_is_what_transformers_says_of_the_base(small, tmp_path, name):
    """Whatever the method's structure is: one adapter, experts with a router, mixed ones."""
    other = type(small)(small.base, echoing(small, tmp_path / "data"))
    config = from_dict(tree(other, method={"name": name}))
    summary = experiment.train(config, tmp_path / "run")
    found = [line for line in lines(tmp_path / "run") if line["kind"] == "score"]
    assert scores(tmp_path / "run") == [(0, "validation"), (1, "validation"), (2, "validation"), (0, "test"),
                                        (summary["round"], "test")]  # fmt: skip
    for line in (found[0], found[3]):
        expected = answers_of_the_base(other, line["split"])
        assert line["clients"] == pytest.approx(expected) and line["mean"] > 0
    assert summary["base"] == found[3] and summary["scores"] == found[4]


def test_nothing_else_of_the_run_changes(small, tmp_path):
    for name, base in (("with", True), ("without", False)):
        experiment.train(from_dict(tree(small, eval={"base": base})), tmp_path / name)
    kept = [line for line in lines(tmp_path / "with") if not (line["kind"] == "score" and line["round"] == 0)]
    assert kept == lines(tmp_path / "without")
    weights = "adapters/ada/adapter_model.safetensors"
    assert (tmp_path / "with" / weights).read_bytes() == (tmp_path / "without" / weights).read_bytes()


def test_the_base_is_never_the_best_round(small, tmp_path, monkeypatch):
    perfect = {"clients": {"ada": 100.0}, "metric": "rouge1", "mean": 100.0, "std": 0.0, "worst_half": 100.0}
    perfect |= {"loss": 0.0, "losses": {"ada": 0.0}}
    monkeypatch.setattr(build.Experiment, "score_base", lambda self, split, **options: Summary(**perfect))
    summary = experiment.train(from_dict(tree(small)), tmp_path / "run")
    assert summary["base"]["mean"] == 100.0 and summary["round"] in (1, 2)


def test_tested_during_training_it_is_scored_once(small, tmp_path):
    summary = experiment.train(from_dict(tree(small, eval={"during": "test"})), tmp_path / "run")
    assert scores(tmp_path / "run") == [(0, "test"), (1, "test"), (2, "test"), (summary["round"], "test")]
    assert summary["base"] == next(line for line in lines(tmp_path / "run") if line["kind"] == "score")


@pytest.mark.parametrize("stop", [(1, "round"), (0, "test")])
def test_a_resumed_run_is_as_an_uninterrupted_one(small, tmp_path, monkeypatch, stop):
    """Stopped in round 2, and between the base's test scores and the model's."""
    config = from_dict(tree(small))
    experiment.train(config, tmp_path / "whole")
    at, what = stop
    seen: list[Any] = []
    log = Run.log

    def stopping(self: Run, record: Any) -> None:
        log(self, record)
        seen.append(record)
        rounds = sum(line["kind"] == "round" for line in seen)
        tested = record["kind"] == "score" and (record["round"], record["split"]) == (0, "test")
        if (what == "test" and tested) or (what == "round" and record["kind"] == "client" and rounds == at):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", stopping)
        with pytest.raises(KeyboardInterrupt):
            experiment.train(config, tmp_path / "run")
    assert (0, "validation") in scores(tmp_path / "run")
    experiment.train(config, tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    assert scores(tmp_path / "run").count((0, "validation")) == 1


def test_a_method_that_merges_runs(small, tmp_path):
    summary = experiment.train(
        from_dict(tree(small, rounds=1, method={"name": "potara", "samples": 2})), tmp_path / "r"
    )
    needed = [json.loads((tmp_path / "r/needs" / name / "summary.json").read_text()) for name in ("fedit", "local")]
    assert [one["base"] for one in needed] == [summary["base"]] * 2
    assert scores(tmp_path / "r")[0] == (0, "test")


def test_a_comparison_has_a_line(small, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_drawn", lambda table, out, split: {})
    rows = {"seeds": [0], "rows": {"one": ["method=local"], "two": ["method=fedit"]}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree(small, rounds=1, compare=rows)))
    table = compare.compare(section.read_rows(tmp_path / "c.yaml"), tmp_path / "out")
    text = (tmp_path / "out/table.md").read_text().splitlines()
    assert [line.split(" | ")[0].lstrip("| ") for line in text[2:6]] == ["base", "rule", "one", "two"]
    assert any("without any adapter" in line for line in text)
    (base,) = table.baselines["base"]
    assert base.client("ada")
    assert (tmp_path / "out/table.csv").read_text().splitlines()[1].startswith("base,,1,")
    assert json.loads((tmp_path / "out/table.json").read_text())["base"]["label"] == "base"
