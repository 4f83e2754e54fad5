"""`llm-fed compare --runs`: finished runs grouped by everything but seeds, paired, and judged; what does not go
together is refused."""

import json
from pathlib import Path

import pytest

from llm_fed.basics.errors import UserError
from llm_fed.commands.finished import compare_runs
from llm_fed.runs.reading import config_text
from llm_fed.settings.configfile import from_dict

SCORES = {0: 50.0, 1: 47.0, 2: 55.0, 3: 52.0}  # of fedit, by seed


def write(folder: Path, seed: int, method: dict, score: float, **changes) -> Path:
    """A finished run as far as a comparison reads it: its configuration, summary and last round."""
    tree = {"seed": seed, "rounds": 4, "method": method, "task": {"name": "flan", "path": str(folder)}, **changes}
    config = from_dict(tree)
    clients = {"ada": score + 5, "bob": score - 5}
    run = folder / f"{method['name']}-{len(list(folder.glob('*')))}"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config_text(config))
    scores = {"metric": "rouge1", "clients": clients, "mean": score, "worst_half": score - 5}
    examples = dict.fromkeys(clients, {"train": 16, "test": 4})
    done = {"method": method["name"], "round": 3, "scores": scores, "examples": examples}
    (run / "summary.json").write_text(json.dumps(done))
    last = {"kind": "score", "round": 4, "split": "validation", **scores, "mean": score - 1}
    (run / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    return run


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """FedIT and FedMerge, which is 10 points better give or take one, on four federations."""
    found = [write(tmp_path, seed, {"name": "fedit"}, score) for seed, score in SCORES.items()]
    better = {seed: score + 10 + seed % 2 for seed, score in SCORES.items()}
    return found + [write(tmp_path, seed, {"name": "fedmerge", "num_models": 2}, x) for seed, x in better.items()]


def test_methods_are_held_against_the_rule_that_their_runs_know(runs):
    """Of 35 on each federation: fedit is 12 to 20 above it, fedmerge 23 to 31. The two clients are the same in each
    draw, and draws have a quarter in common, so that fedit's lead is not shown at the 99 % that rules have."""
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        rule = {"round": 0, "split": "test", "metric": "rouge1", "clients": {"ada": 37.0, "bob": 33.0}}
        (run / "summary.json").write_text(json.dumps(summary | {"rule": {**rule, "mean": 35.0, "worst_half": 33.0}}))
    said = compare_runs(runs).sentences
    average = "average over the clients: fedmerge is shown to be above rule; fedit is not shown to be above rule"
    assert average in said
    assert not [line for line in said if " > rule" in line or "rule >" in line]


def test_runs_are_paired_by_their_seed(runs):
    """In any order: differences 10, 11, 10, 11, of mean 10.5 and variance 1 / 3, far from 0. There are two clients
    with a fifth of their rows tested, of which draws have a quarter in common."""
    verdict = compare_runs([runs[5], runs[0], *runs[6:], runs[4], *runs[1:4]])
    (pair,) = verdict.column.pairs
    assert (pair.first, pair.second, pair.draws, pair.claim) == ("fedmerge", "fedit", 4, "greater")
    assert verdict.drawn == "splits" and (pair.difference, pair.draw) == pytest.approx((10.5, 1 / 3))
    assert pair.floor == pytest.approx(1 / 12)


def test_a_draw_that_one_lacks_is_left_out(runs):
    (pair,) = compare_runs(runs[:7]).column.pairs
    assert pair.draws == 3


def test_labels_say_what_differs(runs, tmp_path):
    """A method's own settings where that method has several, other keys everywhere."""
    more = [write(tmp_path, s, {"name": "fedmerge", "num_models": 4}, x) for s, x in SCORES.items()]
    assert list(compare_runs([*runs, *more]).scores) == ["fedit", "fedmerge num_models=2", "fedmerge num_models=4"]
    other = [write(tmp_path, s, {"name": "fedit"}, x, participation=0.5) for s, x in SCORES.items()]
    assert list(compare_runs([*runs[:4], *other]).scores) == ["fedit participation=1.0", "fedit participation=0.5"]


def test_a_seed_of_its_own_is_the_federation(runs, tmp_path):
    """seed=9 with seeds.federation=2 and seeds.training=7 is another training on the federation of seed=2, but its test
    examples are another sample, unless seeds.evaluation says so."""
    own = {"federation": 2, "training": 7, "evaluation": 2}
    extra = [write(tmp_path, 9, {"name": "fedit"}, 50, seeds={**own, "evaluation": None})]
    with pytest.raises(UserError, match="same federation seed but other clients or other test examples"):
        compare_runs([*runs, *extra])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"task": {"name": "flan", "path": "/elsewhere"}}, "task.path is .* and '/elsewhere'"),
        ({"eval": {"limit": 5}}, "eval.limit is None and 5"),
        ({"eval": {"during": "test"}}, "eval.during is 'validation' and 'test'"),
    ],
)
def test_data_and_scoring_must_agree(runs, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        compare_runs([*runs, write(tmp_path, 0, {"name": "local"}, 40, **changes)])


def test_the_metric_must_agree(runs):
    path = runs[-1] / "summary.json"
    path.write_text(path.read_text().replace("rouge1", "exact_match"))
    with pytest.raises(UserError, match="metric is 'rouge1' and 'exact_match'"):
        compare_runs(runs)


def test_the_command(runs, tmp_path, llm_fed):
    said = llm_fed("compare", "--runs", *runs, "--out", tmp_path / "verdict")
    assert (
        said.code == 0 and "fedmerge > fedit by 10.50 [" in said.out and "verdict.md and verdict.png are in" in said.out
    )
    assert "## Verdict" in (tmp_path / "verdict/verdict.md").read_text()
    assert (tmp_path / "verdict/verdict.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(llm_fed("compare", *runs, "--runs", "--json").out)
    assert found["columns"]["average"]["bold"] == ["fedmerge"] and found["unit"] == "federation"


def test_the_command_for_a_table_of_scores(tmp_path, llm_fed):
    """Three draws of three clients: Nadeau and Bengio's interval, which needs the share."""
    lines = [f"{row},{draw},NA{k},{50 + 9 * (row == 'b') + draw + k * draw % 2}" for row in "ab" for draw in range(3)
             for k in range(3)]  # fmt: skip
    path = tmp_path / "scores.csv"
    path.write_text("row,draw,client,score\n" + "\n".join(lines[:-1]) + "\nb,2,NA2,62.5\n")
    said = llm_fed("verdict", path, "--drawn", "splits", "--test-share", "0.2", "--out", tmp_path / "out")
    assert said.code == 0 and "b > a by 9.17 [" in said.out and "these clients and no others" in said.out
    assert (tmp_path / "out/verdict.png").exists()
    assert json.loads(llm_fed("verdict", path, "--drawn", "fixed", "--json").out)["drawn"] == "fixed"
    llm_fed("verdict", path, "--drawn", "rows").assert_refused("'rows'", "federations, splits, fixed")
    llm_fed("verdict", path, "--drawn", "splits", "--test-share", "1").assert_refused("share of NA0 is 1")
    llm_fed("verdict", tmp_path / "none.csv", "--drawn", "splits").assert_refused("cannot be read as CSV")


def test_mistakes(runs, tmp_path, llm_fed):
    llm_fed("compare", "--runs", *runs[:4]).assert_refused("differ only in their seeds")
    llm_fed("compare", "--runs", *runs, "--draws", "3").assert_refused("--runs", "--draws")
    llm_fed("compare", "--runs", runs[0], tmp_path / "none").assert_refused("is not a run folder")
    again = write(tmp_path, 0, {"name": "fedit"}, 50)
    llm_fed("compare", "--runs", *runs, again).assert_refused("have the same settings and the same seeds")
