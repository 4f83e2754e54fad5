"""What a run says before its first round, and what a dry run says of it and leaves behind: nothing."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import without
from rich.console import Console

from llm_fed.bench import build
from llm_fed.experiment import announce, run
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(announce, "_peak", without.PEAK)


def planned(tree, folder: Path, **how):
    return run.dry_run(from_dict(tree), folder, reporter=Reporter(Console(quiet=True)), **how)


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_plan_of_a_run_on_text(small, llm_fed, tmp_path):
    """Of bob's six training examples one is made too long. A rank-2 adapter on two layers' q_proj (24 -> 24) and v_proj
    (24 -> 12) has 2 * (2 * 48 + 2 * 36) = 336 parameters; the base 10,800."""
    data = tmp_path / "data"
    for path, content in listing(small.data).items():
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).write_bytes(content)
    with open(data / "bob/train.jsonl", "a") as file:
        file.write(json.dumps({"instruction": "w20 " * 40, "output": "w7"}) + "\n")
    config = small.config(tmp_path / "c.yaml", task={"path": str(data)}, rounds=2, participation=0.6)
    said = llm_fed("run", config, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    found = dict(line.split(None, 1) for line in said.err.splitlines() if line[:1].islower())
    assert found["method"].startswith("fedit: FedIT (Zhang et al. 2024)") and found["method"].endswith(", 2 rounds")
    assert found["clients"] == "3, 2 of them sampled in each round"
    assert found["examples"] == (
        "18 for training (6 per client), 6 for validation (2 per client), 9 for testing (3 per client); "
        "left out because too long: 1 training"
    )
    assert found["base"] == f"{small.base}, 10,800 parameters, float32, on cpu in 1 process"
    assert found["training"] == (
        "a LoRA adapter of rank 2 on q_proj, v_proj: 336 parameters per client, all of which are sent"
    )
    assert found["each"] == "round 2 steps of 2 examples, learning rate 0.05, decaying to 0.02 in the last"
    assert found["scores"] == "rouge1 on the clients' validation examples after every round; the best round is tested"
    before_rounds = said.err.index("scores ")
    assert said.err.index("method ") < before_rounds < said.err.index("round 1/2: loss")


def test_a_merging_method_names_the_runs_that_it_trains_first(small, tmp_path):
    quick = {"every": 0, "max_new_tokens": 1, "cross": False}
    tree, said = small.tree(rounds=1, method={"name": "potara"}, local={"steps": 1}, eval=quick), io.StringIO()
    plan = planned(tree, tmp_path / "run")
    assert plan.rows()["method"].endswith("trains fedit and local first and merges their results")
    fedit, local = plan.parents
    assert (fedit.method, local.method) == ("fedit", "local")
    assert plan.costs.down_run == fedit.costs.down_run + local.costs.down_run > fedit.costs.down_run
    run.train(from_dict(tree), tmp_path / "run", reporter=Reporter(Console(file=said, soft_wrap=True)))
    starts = [line.split(":")[0].split()[1] for line in said.getvalue().splitlines() if line.startswith("method ")]
    assert starts == ["potara", "fedit", "local"]
    assert said.getvalue().count("\nbase  ") == 1  # what is as in the run before is not said again
    moved = [read_records(tmp_path / f"run/needs/{need}/metrics.jsonl") for need in ("fedit", "local")]
    up = sum(line["bytes_up"] for lines in moved for line in lines if line["kind"] == "round")
    assert plan.costs.up_run == up


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"name": "fedit"}, "transport": "float16"},
        {"method": {"name": "fedmerge", "num_models": 2}, "delay": {"sigma": 1.0, "drop_out": 0.4}},
        {"method": {"name": "fedsa"}, "participation": 0.4},
        {"method": {"name": "fedalt"}, "privacy": {"clip": 1.0, "where": "client"}},
        {"method": {"name": "local"}},
    ],
    ids=lambda changes: changes["method"]["name"],
)
def test_bytes_are_those_of_the_run(small, tmp_path, changes):
    """Where every client moves the same in every round."""
    tree = small.tree(eval={"every": 0, "max_new_tokens": 1, "cross": False}, **changes)
    costs = planned(tree, tmp_path / "run").costs
    run.train(from_dict(tree), tmp_path / "run", reporter=Reporter(Console(quiet=True)))
    lines = read_records(tmp_path / "run/metrics.jsonl")
    rounds = [line for line in lines if line["kind"] == "round"]
    assert costs.down_run == sum(line["bytes_down"] for line in rounds)
    assert costs.up_run == sum(line["bytes_up"] for line in rounds)
    clients = [line for line in lines if line["kind"] == "client"]
    assert {line["bytes_up"] for line in clients} == {costs.up.least}


def test_a_dry_run_leaves_nothing(small, llm_fed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small.config(tmp_path / "c.yaml")
    said = llm_fed("run", config, "--dry-run")
    assert said.code == 0, said.err
    labels = [line[:11].strip() for line in said.out.splitlines()]
    assert labels == [
        "run", "method", "clients", "examples", "look-up", "base", "training", "each round", "trust", "work", "scores",
        "cross", "messages", "memory", "fits", "disk", "free",
    ]  # fmt: skip
    assert "runs/c-fedit-seed0 would be a new run" in said.out and "round 1" not in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]
    llm_fed("run", config, "--dry-run", "adapter.target_modules=[nothing]").assert_refused("matches no layer")
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_a_dry_run_says_where_a_run_goes_on(small, llm_fed, tmp_path, monkeypatch):
    config = small.config(tmp_path / "c.yaml", eval={"max_new_tokens": 1})

    def interrupted(self, line):
        if line["kind"] == "round" and line["round"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "record", interrupted)
        assert llm_fed("run", config, "--out", tmp_path / "run").code == 130
    before = listing(tmp_path / "run")
    said = llm_fed("run", config, "--out", tmp_path / "run", "--dry-run")
    assert said.code == 0 and "would continue at round 3 of 3" in said.out
    assert "would be a new run" in llm_fed("run", config, "--out", tmp_path / "run", "--dry-run", "--fresh").out
    other = llm_fed("run", config, "local.steps=1", "--out", tmp_path / "run", "--dry-run")
    other.assert_refused("another configuration")
    assert listing(tmp_path / "run") == before
    went_on = llm_fed("run", config, "--out", tmp_path / "run")
    assert went_on.code == 0 and "continuing at round 3" in went_on.err
    assert "\nclients " not in went_on.err and "method " in went_on.err  # shorter: it was said before
    before = listing(tmp_path / "run")
    assert "is complete" in llm_fed("run", config, "--out", tmp_path / "run", "--dry-run").out
    assert listing(tmp_path / "run") == before


def test_the_plan_as_json(small, tmp_path):
    found = json.loads(json.dumps(asdict(planned(small.tree(), tmp_path / "run"))))
    assert found["example_counts"]["training"] == {"total": 18, "least": 6, "most": 6}
    assert found["costs"]["down_run"] == 3 * 3 * found["costs"]["down"]["least"]
    assert found["parameters"]["most"] == 336 and "float32, on cpu" in found["lines"]["base"]


def test_the_memory_of_a_step_is_measured_and_changes_nothing(small, tmp_path, measured):
    """Three clients of 336 parameters hold at least a row, a gradient and two moments; a larger batch takes more."""
    tree = small.tree(rounds=1, method={"name": "scaffold"}, local={"steps": 5, "optimizer": "sgd", "batch_size": 1})
    built = build.prepare(from_dict(tree), Reporter(Console(quiet=True)))
    before = {id: dict(vars(site)) for id, site in built.clients.items()}
    least = announce.with_costs(announce.run_plan(built), built, tmp_path).costs.step
    assert {id: dict(vars(site)) for id, site in built.clients.items()} == before
    assert built.runtime.take_work().tokens == 0
    more = planned({**tree, "local": {**tree["local"], "batch_size": 4}}, tmp_path / "run").costs.step
    assert 3 * 4 * 336 * 4 < least < more


@pytest.mark.parametrize("free", [0, 20_000])
def test_a_step_that_does_not_fit_is_refused(small, llm_fed, tmp_path, measured, monkeypatch, free):
    """Before it is taken, as its process would be killed."""
    taken = []
    real = announce._peak
    monkeypatch.setattr(announce, "_peak", lambda *given: (taken.append(given[3:]), real(*given))[1])
    monkeypatch.setattr(announce, "free_memory", lambda device: free)
    said = llm_fed("run", small.config(tmp_path / "c.yaml"), "--dry-run", "--out", tmp_path / "run")
    said.assert_refused("a training step takes about", "of memory beside the base, and", "are free")
    assert taken == [(1,), (2,)] and not (tmp_path / "run").exists()
