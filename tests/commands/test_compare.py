"""Comparisons: rows and seeds of one file, shared runs, continuing, failures and draws."""

import json
from pathlib import Path

import pytest
import yaml

from llm_fed.basics.errors import UserError
from llm_fed.commands import compare
from llm_fed.commands.comparison import ComparisonPlan
from llm_fed.commands.section import read_rows, read_section
from llm_fed.eval import plots
from llm_fed.experiment import run
from llm_fed.runs.folder import config_text
from llm_fed.runs.records import read_records
from llm_fed.scoring.scores import ABILITY
from llm_fed.settings import configfile

ROWS = {
    "fedit": ["method=fedit"],
    "fedavg again": ["method=fedavg"],
    "potara t=1": ["method=potara", "method.fed_round=1"],
    "fedmerge d=2": ["method=fedmerge", "method.num_models=2"],
}


def write(small, path: Path, rows=ROWS, seeds=(0, 1), **changes) -> Path:
    tree = small.tree(rounds=2, **changes)
    tree["local"]["steps"], tree["eval"]["every"], tree["eval"]["cross"] = 4, 0, False
    path.write_text(yaml.safe_dump({**tree, "compare": {"seeds": list(seeds), "rows": rows}}, sort_keys=False))
    return path


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """The folders that `run.train` is called with, in order (a merging method calls it for what it needs)."""
    folders: list[str] = []
    real = run.train

    def spy(config, folder, **settings):
        folders.append(folder.name)
        return real(config, folder, **settings)

    monkeypatch.setattr("llm_fed.experiment.run.train", spy)
    return folders


@pytest.fixture(scope="module")
def done(small, tmp_path_factory) -> Path:
    """A finished comparison of ROWS with two seeds; it must not be changed."""
    folder = tmp_path_factory.mktemp("compare")
    compare.compare(read_rows(write(small, folder / "c.yaml")), folder / "out")
    return folder


def rows_of(folder: Path) -> dict[str, dict]:
    return {row["label"]: row for row in json.loads((folder / "table.json").read_text())["rows"]}


def test_equal_and_needed_runs_are_trained_once(done):
    """`fedavg` is `fedit`; POTARA takes the row's FedIT run and a local run of its own."""
    names = sorted(path.name for path in (done / "out").iterdir() if path.is_dir())
    assert names == [f"{row}-seed{seed}" for row in ("fedit", "fedmerge-d=2") for seed in (0, 1)] + [
        "needs", "potara-t=1-seed0", "potara-t=1-seed1",
    ]  # fmt: skip
    needs = [path.name.split("-") for path in (done / "out/needs").iterdir()]
    assert sorted((name, seed) for name, _, seed in needs) == [("local", "seed0"), ("local", "seed1")]
    assert not list((done / "out").glob("potara*/needs"))
    rows = rows_of(done / "out")
    assert rows["fedavg again"]["seeds"] == rows["fedit"]["seeds"]
    kept = sorted(path.name for path in (done / "out/fedit-seed0/checkpoints").glob("round-*"))
    assert kept[0].endswith("1")  # the round that POTARA asks for


def test_the_table_holds_what_the_runs_say(done):
    rows = rows_of(done / "out")
    for label in ("fedit", "fedmerge d=2", "potara t=1"):
        scores = []
        for seed in ("0", "1"):
            cell = rows[label]["seeds"][seed]
            summary = json.loads((done / "out" / cell["folder"] / "summary.json").read_text())
            assert cell["clients"] == summary["scores"]["clients"] and cell["average"] == summary["scores"]["mean"]
            assert cell["worst_half"] == summary["scores"]["worst_half"] and cell["round"] == summary["round"]
            scores.append(cell["average"])
        spread = rows[label]["average"]
        assert spread["mean"] == pytest.approx(sum(scores) / 2) and spread["mean"] > 0
        assert spread["std"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)  # n - 1 = 1


def test_bytes_are_those_of_the_messages_and_of_what_a_method_needs(done):
    """Two rounds of FedIT, but POTARA uses the first alone, and of the local run the last: two empty messages."""
    rows = rows_of(done / "out")
    lines = [line for line in read_records(done / "out/fedit-seed0/metrics.jsonl") if line["kind"] == "client"]
    one = lines[0]["bytes_up"]
    assert len(lines) == 6 and {line["bytes_up"] for line in lines} == {one}
    each = {"up_per_round": one, "down_per_round": one, "up": 2 * one, "down": 2 * one}
    assert rows["fedit"]["bytes"] == each | {"total": len(lines) * 2 * one}
    (empty,) = {
        line["bytes_up"]
        for folder in (done / "out/needs").iterdir()
        for line in read_records(folder / "metrics.jsonl")
        if line["kind"] == "client"
    }
    assert rows["potara t=1"]["bytes"]["up"] == one + 2 * empty
    assert rows["potara t=1"]["bytes"]["up_per_round"] == one + empty
    assert "up to the round that it uses" in (done / "out/table.md").read_text()


def test_finished_runs_are_read_and_a_new_row_may_share_them(done, small, tmp_path, trained, llm_fed):
    """Also where the earlier command knew the run under another label, or only as a need."""
    before = (done / "out/table.md").read_text()
    said = llm_fed("compare", done / "c.yaml", "--out", done / "out")
    assert said.code == 0 and trained == []
    assert (done / "out/table.md").read_text() == before
    out = tmp_path / "out"
    config = write(small, tmp_path / "c.yaml", {"alone": ["method=local"], **ROWS}, seeds=[0])
    first = llm_fed("compare", config, "--methods", "alone", "--out", out)
    assert first.code == 0 and trained == ["alone-seed0"]
    renamed = write(small, tmp_path / "d.yaml", {"on its own": ["method=local"]}, seeds=[0])
    again = llm_fed("compare", renamed, "--out", out, "--json")
    assert trained == ["alone-seed0"]
    (row,) = json.loads(again.out)["rows"]
    assert row["label"] == "on its own" and row["seeds"]["0"]["folder"].endswith("alone-seed0")
    assert row["average"]["std"] is None and row["bytes"]["up"] > 0


def test_an_interrupted_comparison_has_a_table_and_goes_on(small, tmp_path, trained, llm_fed, monkeypatch):
    config = write(small, tmp_path / "c.yaml", {"a": ["method=local"], "b": ["method=fedit"]}, seeds=[0])
    spied = run.train

    def interrupt(config, folder, **settings):
        if config.method["name"] == "fedit":
            raise KeyboardInterrupt
        return spied(config, folder, **settings)

    monkeypatch.setattr("llm_fed.experiment.run.train", interrupt)
    assert llm_fed("compare", config, "--out", tmp_path / "out").code == 130
    rows = rows_of(tmp_path / "out")
    assert rows["a"]["average"] is not None and (rows["b"]["seeds"], rows["b"]["average"]) == ({}, None)
    assert "0 of 1" in (tmp_path / "out/table.md").read_text()
    monkeypatch.setattr("llm_fed.experiment.run.train", spied)
    said = llm_fed("compare", config, "--out", tmp_path / "out")
    assert said.code == 0 and trained == ["a-seed0", "b-seed0"]
    assert rows_of(tmp_path / "out")["b"]["average"] is not None
    assert "table.md" in said.out and "average" in said.out


def test_a_run_that_fails_does_not_lose_the_others(small, tmp_path, trained, llm_fed):
    """A learning rate that overflows in the first step: every client fails, and POTARA that needs this run with it."""
    wild = ["local.lr=1e37", "local.lr_end=1e37"]
    rows = {"wild": ["method=fedit", *wild], "merged": ["method=potara", *wild], "tame": ["method=local"]}
    said = llm_fed("compare", write(small, tmp_path / "c.yaml", rows, seeds=[0]), "--out", tmp_path / "out")
    assert said.code == 1 and "wild seed 0, merged seed 0 failed" in said.err.splitlines()[-1]
    assert {"wild-seed0", "tame-seed0"} < {*trained} and "merged-seed0" not in trained
    found = rows_of(tmp_path / "out")
    assert found["wild"]["seeds"]["0"].startswith("failed: every client of round 1 failed")
    assert found["merged"]["seeds"]["0"].startswith("failed: its fedit run failed: every client of round 1 failed")
    assert found["wild"]["average"] is None and found["tame"]["average"]["mean"] >= 0
    text = (tmp_path / "out/table.md").read_text()
    assert "| wild |  |  |  |  |  | 0 of 1 |" in text and "- wild, seed 0 failed: every client" in text


@pytest.mark.parametrize(
    "rows, words, messages",
    [
        ({"a": ["method=fedti"]}, [], ["row 'a'", "'fedti' is unknown (the closest is 'fedit')"]),
        ({"a": ["method=fedit", "method.num_models=2"]}, [], ["row 'a'", "method.num_models"]),
        ({"a": ["local.lrr=1"]}, [], ["row 'a'", "the closest is 'lr'"]),
        ({"a": ["adapter.target_modules=[q_porj]"]}, [], ["row 'a'", "matches no layer", "q_proj"]),
        ({"a": ["method=potara", "method.fed_round=3"]}, [], ["row 'a'", "round 3 of fedit", "rounds=2"]),
        ({"a": ["eval.metric=rouge1"], "b": ["eval.metric=exact_match"]}, [], ["the same metric", "a by rouge1"]),
        ({"a": []}, ["--methods", "fedite"], ["no row or method 'fedite' (the closest is 'fedit')"]),
        ({"a": []}, ["--seeds", "0,x"], ["--seeds", "whole numbers"]),
        ({"a": []}, ["method=local"], ["method=local", "--methods"]),
        ({"a": []}, ["seed=3"], ["seed=3", "--seeds"]),
        ({"a": ["seed=3"]}, [], ["row 'a' has a seed", "--seeds"]),
        ({"a": []}, ["compare.seeds=[1]"], ["compare.seeds=[1] is no setting of a run", "--seeds"]),
        ({}, [], ["has no compare section", "--methods"]),
        ({"a": "method=fedit"}, [], ["row 'a'", "list of words"]),
        ({"a": ["fedit"]}, [], ["row 'a'", "list of words"]),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(small, tmp_path, llm_fed, trained, rows, words, messages):
    good = {"good": ["method=local"]} if rows else {}
    config = write(small, tmp_path / "c.yaml", {**good, **rows}, seeds=[0])
    llm_fed("compare", config, *words, "--out", tmp_path / "out").assert_refused(*messages)
    assert trained == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "section, message",
    [([1], "takes a mapping"), ({"row": {}}, "the closest is 'rows'"), ({"rows": [1]}, "takes labels"),
     ({"seeds": [0, "one"]}, "whole numbers"), ({"seeds": 3}, "whole numbers")],
)  # fmt: skip
def test_a_section_that_is_none(tmp_path, section, message):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"compare": section}))
    with pytest.raises(UserError, match=message):
        read_section(path)


def test_another_configuration_in_a_rows_folder_is_refused(small, tmp_path, llm_fed, trained):
    config = write(small, tmp_path / "c.yaml", {"a": ["method=local"]}, seeds=[0])
    assert llm_fed("compare", config, "local.steps=1", "--out", tmp_path / "out").code == 0
    llm_fed("compare", config, "--out", tmp_path / "out").assert_refused("another configuration", "local.steps: 1 -> ")
    assert trained == ["a-seed0"]


def test_more_rounds_extend_a_row_s_run(small, tmp_path, llm_fed, trained):
    """But not the run that another row has there, under the label that it had before."""
    config, out = write(small, tmp_path / "c.yaml", {"a": ["method=local"]}, seeds=[0]), tmp_path / "out"
    assert llm_fed("compare", config, "rounds=1", "--out", out).code == 0
    assert llm_fed("compare", config, "rounds=2", "--out", out).code == 0
    assert trained == ["a-seed0", "a-seed0"]
    assert json.loads((out / "a-seed0/summary.json").read_text())["rounds"] == 2
    rows = {"b": ["method=local", "rounds=2"], "a": ["method=local", "rounds=3"]}
    config = write(small, tmp_path / "c.yaml", rows, seeds=[0])
    llm_fed("compare", config, "--out", out).assert_refused("two different runs would share", "a-seed0", "--out")
    assert json.loads((out / "a-seed0/summary.json").read_text())["rounds"] == 2


def test_a_row_takes_over_what_was_refused_before_its_first_round(small, tmp_path, llm_fed, trained):
    """Also where the rows have changed places since: no two of them write to one folder."""
    out = tmp_path / "out"
    config = write(small, tmp_path / "c.yaml", {"b": ["method=local"], "a": ["method=fedit"]}, seeds=[0])
    (out / "a-seed0").mkdir(parents=True)
    (out / "a-seed0/checkpoints").mkdir()
    (out / "a-seed0/config.yaml").write_text(config_text(configfile.load(config, ["method=local", "seed=0"])))
    assert llm_fed("compare", config, "--out", out).code == 0
    assert sorted(trained) == ["a-seed0", "b-seed0"]
    for name, method in (("a-seed0", "fedit"), ("b-seed0", "local")):
        assert yaml.safe_load((out / name / "config.yaml").read_text())["method"]["name"] == method


def test_a_files_own_hyper_parameters_belong_to_its_own_method(small, tmp_path):
    """They are kept where a row names the same method, and dropped where it names another."""
    rows = {"own": [], "same": ["method=fedmerge", "method.weight_lr=0.5"], "other": ["method=fedem"]}
    config = write(
        small, tmp_path / "c.yaml", rows, method={"name": "fedmerge", "num_models": 3, "soup_init": "shared"}
    )
    plan = ComparisonPlan(read_rows(config, ["local.lr=0.5"], seeds=[7]), tmp_path / "out")
    found = {label: job.config for (label, _), job in plan.cells.items()}
    assert found["own"].method == {"name": "fedmerge", "num_models": 3, "soup_init": "shared"}
    assert found["same"].method == {**found["own"].method, "weight_lr": 0.5}
    assert found["other"].method == {"name": "fedem"}
    assert {(job.seed, job.local.lr) for job in found.values()} == {(7, 0.5)}


def test_folders_are_safe_and_unique(small, tmp_path):
    labels = ["a b", "a/b", "A-b", "../up", "|", "POTARA(50)"]
    rows = {label: [f"local.lr={number}"] for number, label in enumerate(labels, start=1)}
    plan = ComparisonPlan(read_rows(write(small, tmp_path / "c.yaml", rows, seeds=[3])), tmp_path)
    assert [job.folder.relative_to(tmp_path).as_posix() for job in plan.jobs()] == [
        "a-b-seed3", "a-b-2-seed3", "A-b-3-seed3", "up-seed3", "row-seed3", "POTARA-50-seed3",
    ]  # fmt: skip


def test_parents_come_first_and_keep_the_round(small, tmp_path):
    rows = {"t=1": ["method=potara", "method.fed_round=1"], "mean": ["method=mean"], "fedit": ["method=fedit"]}
    plan = ComparisonPlan(read_rows(write(small, tmp_path / "c.yaml", rows, seeds=[0])), tmp_path / "out")
    jobs = list(plan.jobs())
    assert [job.method.__class__.__name__ for job in jobs] == ["FedIT", "Local", "potara", "mean"]
    fedit, local, potara, mean = jobs
    assert fedit is plan.cells["fedit", 0] and mean.parents == potara.parents == {"fedit": fedit, "local": local}
    assert fedit.config.checkpoint.keep_rounds == (1,) and local.config.checkpoint.keep_rounds == ()


def test_scores_by_round_are_those_of_training(small, tmp_path, monkeypatch):
    """The mean of the seeds and their bounds; what clients do after the last round (fedavg+) is not part of it."""
    drawn = {}

    def spy(path, curves, **labels):
        if isinstance(path, Path):  # and not the report's, which is dark
            drawn.update(curves, path=path, **labels)
        return plots.plot_bands(path, curves, **labels)

    monkeypatch.setattr("llm_fed.commands.compare.plot_bands", spy)
    settings = {"fedit": ("fedit", 1, 2), "plus": ("fedavg+", 1, 4), "rarely": ("fedit", 2, 2)}
    rows = {label: [f"method={method}", f"eval.every={every}", f"rounds={rounds}"]
            for label, (method, every, rounds) in settings.items()}  # fmt: skip
    config, out = write(small, tmp_path / "c.yaml", rows), tmp_path / "out"
    compare.compare(read_rows(config, ["eval.during=test", "local.steps=1", "eval.max_new_tokens=2"]), out)
    assert "rarely" not in drawn and drawn["path"].read_bytes().startswith(b"\x89PNG")
    assert (drawn["xlabel"], drawn["ylabel"]) == ("round", "rouge1, test")
    for label in ("fedit", "plus"):
        rounds, mean, low, high = drawn[label]
        assert rounds == [1, 2]
        for place, round in enumerate(rounds):
            scores = []
            for seed in (0, 1):
                lines = read_records(out / f"{label}-seed{seed}" / "metrics.jsonl")
                scores.append([line for line in lines if line["kind"] == "score" and line["round"] == round][0]["mean"])
            assert (low[place], mean[place], high[place]) == (min(scores), sum(scores) / 2, max(scores))


def test_draws_are_seeds_and_go_on(small, tmp_path, llm_fed, trained):
    """Three draws after one: what is there is not trained again, and from three on there is a verdict."""
    config = write(small, tmp_path / "c.yaml", {"a": ["method=local"], "b": ["method=fedit"]}, seeds=[7])
    out = tmp_path / "out"
    assert llm_fed("compare", config, "--draws", 1, "--out", out).code == 0
    assert trained == ["a-seed0", "b-seed0"] and not (out / "verdict.png").exists()
    assert "cannot be known from 1 draw" in (out / "table.md").read_text()
    said = llm_fed("compare", config, "--draws", 3, "--out", out)
    assert said.code == 0 and sorted(trained[2:]) == ["a-seed1", "a-seed2", "b-seed1", "b-seed2"]
    table = json.loads((out / "table.json").read_text())
    (pair,) = table["verdict"]["columns"]["average"]["pairs"]
    assert pair["draws"] == 3 and pair["sentence"] in said.out and pair["sentence"] in (out / "table.md").read_text()
    cells = [row["seeds"]["2"] for row in table["rows"]]
    assert [(cell["federation"], cell["training"]) for cell in cells] == [(2, 2)] * 2
    assert all(0 < share < 1 for cell in cells for share in cell["shares"].values()) and cells[0]["shares"]
    assert (out / "verdict.png").exists() == (pair["low"] is not None)
    assert table["drawn"] == "fixed"  # a client's test rows are a file of their own: no seed divides them
    llm_fed("compare", config, "--draws", 2, "--seeds", "0,1", "--out", out).assert_refused(
        "--draws 2", "give only one"
    )
    fixed = llm_fed("compare", config, "seeds.federation=1", "--draws", 2, "--out", tmp_path / "other")
    fixed.assert_refused("row 'a'", "seeds.federation=1 is the same in every draw")


def test_what_models_forget_is_measured_on_a_fixed_text(small, tmp_path):
    """By table, and on each card; the base, which all clients share, alike for all of them."""
    rows = {"alone": ["method=local", "local.lr=1.0"], "gently": ["method=local", "local.lr=1e-6", "local.lr_end=0"]}
    config = write(small, tmp_path / "c.yaml", rows, seeds=[0], eval={"ability": True, "base": True})
    table = compare.compare(read_rows(config), tmp_path / "out")
    (base,) = table.baselines["base"]
    before = base.beside(ABILITY).mean
    after = {row.label: row.beside(ABILITY).mean for row in table.rows}
    assert after["gently"] == pytest.approx(before, rel=1e-3) != after["alone"]
    assert "base ability" in table.heads
    card = next((tmp_path / "out/alone-seed0/adapters").glob("*/README.md")).read_text()
    assert "| base ability |" in card and f"| base ability before training | {before:.2f} |" in card
