"""`llm-fed compare --runs`, and rows of a comparison: finished runs that are paired and judged, rows that take the same
work, and runs that share what they can."""

import json
import math
from pathlib import Path

import equal_runs
import every
import pytest
import small_run
from rich.console import Console

from llm_fed.basics.errors import UserError
from llm_fed.bench.build import prepare
from llm_fed.commands import compare, section
from llm_fed.commands.finished import compare_runs
from llm_fed.experiment import announce, run
from llm_fed.runs.folder import config_text
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
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
    scores = {"metric": "rouge1", "clients": clients, "mean": score, "worst_half": score - 5, "losses": {}}
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
    for folder in runs:
        summary = json.loads((folder / "summary.json").read_text())
        rule = {"round": 0, "split": "test", "metric": "rouge1", "clients": {"ada": 37.0, "bob": 33.0}}
        (folder / "summary.json").write_text(json.dumps(summary | {"rule": {**rule, "mean": 35.0, "worst_half": 33.0}}))
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


# The work that rows take of each client


STEPS = {"local": 8, "pooled": 8, "fedit": 8, "fedlora": 8, "ditto": 16, "potara": 16}


@pytest.fixture(scope="module")
def compared(small, tmp_path_factory) -> Path:
    """A comparison by command line whose words change rounds and steps; not to be changed."""
    from llm_fed import cli

    folder = tmp_path_factory.mktemp("work")
    config = small.config(folder / "c.yaml", eval={"every": 0})
    words = ["compare", config, "rounds=4", "local.steps=2", "--out", folder / "out"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, words), "--methods", "ditto,fedlora,pooled,fedit,potara,local"])
    assert not ended.value.code
    return folder / "out"


def test_all_rows_take_rounds_times_steps_and_the_others_are_named(compared):
    """`fedlora` half of them alone. Its head is local and pooled, in whichever order they were asked for."""
    table = json.loads((compared / "table.json").read_text())
    assert {row["label"]: row["work"]["steps"] for row in table["rows"]} == STEPS
    assert [row["label"] for row in table["rows"]][:2] == ["local", "pooled"]
    (said,) = [sentence for sentence in table["unequal"] if " steps " in sentence]
    assert said == "Not at equal work: a client of local takes 8 steps in all, and one of ditto 16, potara 16."
    text = (compared / "table.md").read_text()
    assert text.index(said) < text.index("One draw") if "One draw" in text else said in text
    assert said in (compared / "table.html").read_text()
    lines = read_records(compared / "fedlora-seed0/metrics.jsonl")
    assert [line["round"] for line in lines if line["kind"] == "round"] == [1, 2]
    assert [line["steps"] for line in lines if line["kind"] == "finish"] == [3 * 4]


def test_work_is_counted_from_what_was_done(compared):
    """Bytes as the client lines have them; of a merge those of both parents; equal batches have equal tokens."""
    rows = {row["label"]: row["work"] for row in json.loads((compared / "table.json").read_text())["rows"]}
    lines = read_records(compared / "fedit-seed0/metrics.jsonl")
    sent = [line["bytes_up"] for line in lines if line["kind"] == "client"]
    assert rows["fedit"]["bytes_up"] == sum(sent) / 3
    assert rows["fedit"]["tokens"] == rows["local"]["tokens"] == sum(line.get("tokens", 0) for line in lines) / 3 > 0
    for key in ("steps", "tokens", "bytes_up"):
        assert rows["potara"][key] == pytest.approx(rows["fedit"][key] + rows["local"][key])
    assert all(row["seconds"] > 0 and math.isfinite(row["seconds"]) for row in rows.values())


@pytest.mark.parametrize(
    ("method", "steps", "own"),
    [("local", 8, 0), ("pooled", 8, 0), ("fedlora", 8, 4), ("ditto", 16, 0), ("potara", 0, 0)],
)
def test_the_plan_says_it_before(small, method, steps, own):
    built = prepare(
        from_dict(small.tree(method={"name": method}, rounds=4, local={"steps": 2})), Reporter(Console(quiet=True))
    )
    plan = announce.run_plan(built, work=True)
    assert (plan.total_steps, plan.own_steps) == (steps, own)
    line = plan.rows().get("work", "")
    assert (f"{steps} steps of a client" in line) == bool(steps) and (f"{own} of them alone" in line) == bool(own)


@pytest.mark.parametrize(
    ("share", "rounds", "together", "own"),
    [(0, 7, 7, 0), (0.5, 7, 4, 6), (0.5, 1, 1, 0), (0.7, 10, 3, 14), (0.999, 3, 1, 4), (0.1, 10, 9, 2)],
)
def test_a_share_of_the_rounds_is_left_to_each_client(small, share, rounds, together, own):
    """ceil((1 - p) rounds) are trained together, at least one; the steps of the others alone, two in each."""
    method = {"name": "fedlora", "personal_share": share}
    built = prepare(
        from_dict(small.tree(method=method, rounds=rounds, local={"steps": 2})), Reporter(Console(quiet=True))
    )
    assert built.config.rounds == together and {site.own_steps for site in built.clients.values()} == {own}
    few = prepare(
        from_dict(small.tree(method=method, rounds=rounds, local={"steps": 2}, participation=0.5)),
        Reporter(Console(quiet=True)),
    )
    assert {site.own_steps for site in few.clients.values()} == {max(1, round(own / 2)) if own else 0}


# What runs share changes no run


@pytest.mark.parametrize("captured", every.quick(["auto", "on"], ["on"]))
def test_runs_of_a_comparison_equal_runs_alone(small, tmp_path, captured):
    """Byte for byte, with two methods and two seeds that hold other rows out. Runs whose passes are captured share
    graphs."""
    data = small_run.write_data(tmp_path / "data", {"train": 11})
    task, quick = {"path": str(data), "validation": 0.4}, {"max_new_tokens": 1, "cross": False}
    path = small.config(tmp_path / "c.yaml", rounds=2, task=task, eval=quick)
    out = tmp_path / "out"
    rows = section.read_rows(path, [f"engine.fast={captured}"], ["fedit", "local"], [0, 1])
    compare.compare(rows, out)
    folders = sorted(config.parent for config in out.glob("*/config.yaml"))
    assert len(folders) == 4
    for folder in folders:
        alone = tmp_path / "alone" / folder.name
        run.train(configfile.load(folder / "config.yaml"), alone)
        ours, its = (equal_runs.without_neighbours(equal_runs.files(each)) for each in (folder, alone))
        assert ours.keys() == its.keys() and len(ours) > 5
        assert [name for name in ours if ours[name] != its[name]] == []
    assert len({(folder / "splits.json").read_bytes() for folder in folders}) == 2


def test_a_base_outside_of_comparisons_keeps_nothing(small):
    from llm_fed.bench.bases import Bases

    config = configfile.load(small.tree())
    assert Bases().of(config).captures is None and Bases(reuse=True).of(config).captures is not None
