"""What a run is compared with: the base alone, and the best rule that trains nothing; in its rounds and at its end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_fed.bench import build
from llm_fed.commands import compare, section
from llm_fed.commands.api import open_run
from llm_fed.experiment import run as experiment
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.scoring.scores import Summary, score
from llm_fed.settings.configfile import from_dict


@pytest.fixture
def small(small):
    return small.as_usual()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(compare, "_drawn", lambda table, out, split: {})


@pytest.fixture
def scored_bases(monkeypatch) -> list[str]:
    """The splits on which the base was scored."""
    splits, score = [], build.Experiment.score_base

    def counted(self: build.Experiment, split: str, **options: Any) -> Any:
        splits.append(split)
        return score(self, split, **options)

    monkeypatch.setattr(build.Experiment, "score_base", counted)
    return splits


def kinds(run: Path) -> list[tuple[str, int, str]]:
    lines = read_records(run / "metrics.jsonl")
    return [(line["kind"], line["round"], line["split"]) for line in lines if line["kind"] in ("score", "rule")]


def test_a_run_scores_the_base_before_its_rounds_and_both_at_its_end(small, tmp_path, scored_bases):
    """A client's answers are always the same, so the most frequent one is always right."""
    summary = experiment.train(from_dict(small.tree(rounds=2)), tmp_path / "run")
    assert scored_bases == ["validation", "test"]
    last = [("score", 0, "test"), ("rule", 0, "test"), ("score", summary["round"], "test")]
    assert kinds(tmp_path / "run")[3:] == last
    assert summary["base"]["split"] == "test" and summary["rule"]["mean"] == 100
    assert summary["rule"]["rules"] == dict.fromkeys(["ada", "bob", "cyd"], "most frequent answer")
    result = open_run(tmp_path / "run")
    assert result.rule == dict.fromkeys(["ada", "bob", "cyd"], 100.0) and result.rules == summary["rule"]["rules"]
    assert result.base == summary["base"]["clients"]


def test_the_samples_take_the_answers_that_the_base_has_given(small, tmp_path, monkeypatch):
    """They are the same lines as if it were asked once more."""
    asked, run = [], build.LocalRuntime.run
    monkeypatch.setattr(build.LocalRuntime, "run", lambda self, work: asked.append(len(work)) or run(self, work))
    for base in ("auto", False):
        config = from_dict(small.tree(rounds=1, eval={"base": base}))
        experiment.train(config, tmp_path / str(base), reporter=Reporter(Console(quiet=True)))
        asked.append(-1)
    alone, again = "".join(str(count) for count in asked if count).split("-1")[:2]
    assert len(alone) == len(again)  # scoring the base in the place of asking it for the samples
    lines = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("auto", "False")]
    assert lines[0] == lines[1] and b'"base": "' in lines[0]


def test_runs_of_a_comparison_score_the_base_once_per_draw(small, tmp_path, scored_bases):
    """On each of two splits. Also a merge and the runs that it needs, and on the test split a comparison that is
    continued; not rows with another base or template."""
    rows = {"one": ["method=local"], "two": ["method=fedit"], "merge": ["method=potara", "method.samples=2"]}
    path = tmp_path / "c.yaml"
    quick = {"rounds": 1, "local": {"steps": 1}, "eval": {"cross": False}}
    path.write_text(yaml.safe_dump(small.tree(**quick, compare={"seeds": [0, 1], "rows": rows})))
    table = compare.compare(section.read_rows(path), tmp_path / "out")
    assert scored_bases.count("test") == scored_bases.count("validation") == 2 and len(table.rows) == 3
    found = json.loads((tmp_path / "out/table.json").read_text())
    assert len(found["base"]["seeds"]) == len(found["rule"]["seeds"]) == 2
    assert found["rows"][0]["seeds"]["1"]["rule"]["rules"]["ada"] == "most frequent answer"
    assert found["rule"]["average"] == {"mean": 100, "std": 0}
    more = rows | {"three": ["method=ffa"], "long": ["method=fedit", "task.template=alpaca"]}
    path.write_text(yaml.safe_dump(small.tree(**quick, compare={"seeds": [0, 1], "rows": more})))
    table = compare.compare(section.read_rows(path), tmp_path / "out")
    assert (scored_bases.count("test"), scored_bases.count("validation")) == (4, 6)
    labels = [row.label for row in table.baselines["base"]]
    assert labels == ["base of one, two, merge, three", "base of long"] or labels == ["base"]  # both may be zero
    assert (tmp_path / "out/three-seed0/metrics.jsonl").read_text().count('"round": 0, "split": "test"') == 2


def test_the_table_and_the_terminal_say_that_the_rule_is_better(small, llm_fed, tmp_path):
    path = small.config(tmp_path / "c.yaml", rounds=1)
    said = llm_fed("run", path, "--out", tmp_path / "run")
    assert "most frequent answer (ada, bob, cyd)" in said.out and "below rule in the mean: fedit" in said.out
    head = next(line for line in said.out.splitlines() if "client" in line)
    assert head.index("base") < head.index("rule") < head.index("fedit")
    table = llm_fed("compare", path, "--methods", "local,fedit", "--out", tmp_path / "table")
    sentence = "cannot be known from 1 draw (observed: "
    assert sentence in table.out and sentence in (tmp_path / "table/table.md").read_text()
    page = (tmp_path / "table/table.html").read_text()
    assert sentence in page and '<th scope="row" title="rule">rule</th>' in page


def test_the_report_has_both(small, tmp_path):
    experiment.train(from_dict(small.tree(rounds=1)), tmp_path / "run")
    page = (tmp_path / "run/report.html").read_text()
    for part in ("<dt>the base alone</dt>", "<dt>the best rule</dt><dd>100.0</dd>", '<th scope="col">rule</th>',
                 "most frequent answer (ada, bob, cyd)", "The mean is below that of the rule"):  # fmt: skip
        assert part in page


def test_under_privacy_there_is_no_rule(small, tmp_path):
    """It is made of training answers without noise."""
    private = small.tree(rounds=1, privacy={"clip": 1.0, "noise": 1.0}, participation=1.0)
    summary = experiment.train(from_dict(private), tmp_path / "run")
    assert "rule" not in summary and "base" in summary
    assert ("rule", 0, "test") not in kinds(tmp_path / "run")


def test_pictures_have_the_most_frequent_class_and_no_base(tmp_path):
    path = tiny_images.npz(tmp_path / "a.npz", train=24, test=12)
    summary = experiment.train(from_dict(tiny_images.tree(path, rounds=1)), tmp_path / "run")
    assert "base" not in summary and set(summary["rule"]["rules"].values()) == {"most frequent class"}


def test_where_the_server_is_tested_the_rule_is_made_of_all_clients_answers(small, tmp_path):
    config = small.tree(rounds=1, method={"name": "fedit"}, task={"server": {"test": True, "examples": 0}})
    summary = experiment.train(from_dict(config), tmp_path / "run")
    assert list(summary["rule"]["clients"]) == ["server"] and 0 < summary["rule"]["mean"] < 100


# The base alone, round by round


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
