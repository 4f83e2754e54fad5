"""Rows of a comparison take the same work of each client, or the table says which do not."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from llm_fed.bench.build import prepare
from llm_fed.experiment import announce
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict

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
    plan = announce.run_plan(built)
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
