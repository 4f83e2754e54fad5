"""Seeds of parts of a run: each moves what it says and nothing else, and all from `seed` where none is given."""

from pathlib import Path

import pytest

from llm_fed.basics.errors import UserError
from llm_fed.bench.build import Experiment, prepare
from llm_fed.experiment import run
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import from_dict

PARTS = ("federation", "training", "evaluation")


def config(small, **changes) -> Config:
    """Ada's, Bob's and Cyd's 24 examples over two clients, who test on a third of theirs."""
    partition = {"kind": "iid", "clients": 2, "test": 0.33}
    return from_dict(small.tree(rounds=1, task={"partition": partition, "validation": 0.2}, **changes))


def prepared(small, **changes) -> Experiment:
    return prepare(config(small, **changes), Reporter())


def pools(built: Experiment) -> dict[str, list[str]]:
    """What each client holds, whichever split it is in."""
    return {
        id: sorted(map(str, [*data.train, *data.held_out, *(query.example for query in data.queries["test"])]))
        for id, data in ((id, site.data) for id, site in built.clients.items())
    }


def queries(built: Experiment) -> dict[str, list[str]]:
    return {id: list(map(str, site.data.queries["test"])) for id, site in built.clients.items()}


def test_each_moves_its_own_part(small):
    plain = prepared(small)
    federation, training, evaluation = (prepared(small, seeds={part: 1}) for part in PARTS)
    assert pools(federation) != pools(plain)
    assert pools(training) == pools(plain) and queries(training) == queries(plain)
    assert pools(evaluation) == pools(plain) and queries(evaluation) != queries(plain)
    assert {site.seed for site in (*training.clients.values(), training.server)} == {1} == {training.schedule.seed}
    assert {site.seed for site in (*federation.clients.values(), *evaluation.clients.values())} == {0}


def test_the_evaluation_sample_is_drawn_where_its_seed_is_given(small):
    """eval.limit keeps the first examples without it; other seeds keep others, and training sees the same."""
    first, one, two = (prepared(small, eval={"limit": 2}, seeds={"evaluation": seed}) for seed in (None, 1, 2))
    whole = queries(prepared(small))
    assert queries(first) == {id: found[:2] for id, found in whole.items()}
    assert queries(one) != queries(two) and all(len(found) == 2 for found in queries(one).values())
    assert queries(one) == queries(prepared(small, eval={"limit": 2}, seeds={"evaluation": 1}))


def test_the_order_of_a_given_split_is_drawn(small):
    """Where the data brings its test split, the evaluation seed alone decides which of it eval.limit keeps."""

    def built(seed: int | None) -> Experiment:
        tree = small.tree(eval={"limit": 1}, seeds={"evaluation": seed})
        return prepare(from_dict(tree), Reporter())

    plain, drawn = built(None), [built(seed) for seed in range(4)]
    assert len({str(queries(each)) for each in (plain, *drawn)}) > 2
    for each in drawn:
        for id, site in each.clients.items():
            same = plain.clients[id].data
            assert (site.data.train, site.data.held_out) == (same.train, same.held_out)


def test_a_seed_for_each_part_is_that_seed_for_all(small, tmp_path):
    """To the byte; and the parts are part of a run's identity."""
    run.train(config(small, seed=3), tmp_path / "one")
    run.train(config(small, seeds=dict.fromkeys(PARTS, 3)), tmp_path / "three")
    lines = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("one", "three")]
    assert lines[0] == lines[1] and b'"score"' in lines[0]
    with pytest.raises(UserError, match="seeds.training: 3 -> 4"):
        run.train(config(small, seeds={"federation": 3, "training": 4, "evaluation": 3}), tmp_path / "three")


def test_names_of_folders():
    assert Config().seed_name == "seed0"
    assert (
        from_dict({"seed": 2, "seeds": {"federation": 3, "evaluation": 0}}).seed_name == "seed2-federation3-evaluation0"
    )


def test_the_command_line(small, tmp_path, llm_fed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(small.config(tmp_path / "plain.yaml", rounds=1).read_text())
    said = llm_fed("run", "c.yaml", "seeds.federation=3")
    assert said.code == 0 and "runs/c-fedit-seed0-federation3" in said.out
    llm_fed("run", "c.yaml", "seeds.federatoin=3").assert_refused("federatoin", "the closest is 'federation'")
