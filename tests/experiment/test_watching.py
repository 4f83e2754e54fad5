"""A run says at its end what is wrong, the same in all places, and nothing where nothing is wrong."""

import json
from dataclasses import dataclass
from typing import Any

import own_steps
import pytest
import small_run
import yaml

import llm_fed as package
from llm_fed.basics.errors import UserError
from llm_fed.bench.build import prepare
from llm_fed.commands.quickstart import ASSETS
from llm_fed.experiment import cross
from llm_fed.experiment import run as experiment
from llm_fed.method import Method
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import PrivacyConfig
from llm_fed.settings.configfile import from_dict

EXCHANGED = {"ada": "bob", "bob": "ada"}


@dataclass(frozen=True)
class Exchanged(Method):
    """Each client trains alone, but the server mistakes two of them for each other."""

    def init(self, server):
        return {client: server.initial() for client in server.clients}

    def broadcast(self, state, client):
        return state[client]

    async def server_update(self, server, state, uploads):
        moved = {EXCHANGED.get(u.client, u.client): u.content for u in uploads}
        return {client: model + moved[client] if client in moved else model for client, model in state.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_run.write_data(tmp_path_factory.mktemp("data") / "data", {"train": 8, "validation": 2, "test": 12})


@pytest.fixture
def small(small):
    return small.as_usual()


@pytest.fixture
def tree(small, data):
    def tree(**changes: Any) -> dict[str, Any]:
        base = {"task": {"path": str(data)}, "rounds": 1, "local": {"steps": 25}, "method": {"name": "local"}}
        return small.tree(**{**base, **changes})

    return tree


@pytest.fixture
def wrong(tree, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(tree(method={"name": f"{__name__}:Exchanged"})))
    return path


def test_models_that_were_exchanged_are_named_everywhere_and_stay_so(wrong, tmp_path, llm_fed):
    out = tmp_path / "run"
    said = llm_fed("run", wrong, "--out", out)
    assert said.code == 0, said
    text = "warning: another client's model answers better than its own: ada ("
    assert text in " ".join(said.out.split()) and text in said.err
    summary = json.loads((out / "summary.json").read_text())
    found = {warned["kind"]: warned for warned in summary["warnings"]}
    assert set(found["another-model"]["clients"]) | set(found["gains-elsewhere"]["clients"]) == {"ada", "bob"}
    assert found["another-model"]["figures"]["ada"]["model"] == "bob"
    assert all({"kind", "clients", "text", "figures"} == warned.keys() for warned in summary["warnings"])
    again = llm_fed("run", wrong, "--out", out, "--json")
    assert json.loads(again.out)["warnings"] == summary["warnings"]
    allowed = f"{__name__}:Exchanged"
    assert package.open_run(out, allow=[allowed]).warnings == summary["warnings"]
    assert text in " ".join(llm_fed("eval", out, "--allow", allowed).out.split())
    page = (out / "report.html").read_text()
    assert 'id="warnings"' in page and "Another client&#39;s model answers better than its own: ada" in page
    cards = {id: (out / "adapters" / id / "README.md").read_text() for id in small_run.CLIENTS}
    assert "## Warnings\n" in cards["ada"] and "nother client's model answers better than its own: " in cards["ada"]
    assert "## Warnings" not in cards["cyd"]


def test_where_nothing_is_wrong_there_is_no_warning(tree, tmp_path):
    """The clean twin: the same without the mistake, with a reference beside it."""
    local = experiment.train(from_dict(tree()), tmp_path / "local")
    merged = experiment.train(from_dict(tree(method={"name": "fedmerge"}, rounds=3, seed=1)), tmp_path / "fedmerge")
    alone = experiment.train(from_dict(tree(method={"name": f"{__name__}:Exchanged"})), tmp_path / "other")
    assert {warned["kind"] for warned in local["warnings"]} <= {"below-rule"} and "unchecked" not in local
    assert {warned["kind"] for warned in merged["warnings"]} <= {"below-rule"}  # three rounds may be too few for that
    assert merged["unchecked"] and "no run of local" in merged["unchecked"][0]  # that one has another seed
    kinds = {warned["kind"]: warned for warned in alone["warnings"]}
    assert "below-local" in kinds and "unchecked" not in alone
    assert kinds["below-local"]["figures"]["ada"]["local"] == pytest.approx(local["scores"]["clients"]["ada"], rel=1e-5)


def test_in_a_comparison_local_may_come_last(tree, tmp_path, llm_fed):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree()))
    words = (tmp_path / "c.yaml", "--methods", f"{__name__}:Exchanged,local", "--out", tmp_path / "table")
    assert llm_fed("compare", *words).code == 0
    (run,) = (tmp_path / "table").glob("*Exchanged*/summary.json")
    done = json.loads(run.read_text())
    assert "below-local" in [warned["kind"] for warned in done["warnings"]] and "unchecked" not in done
    assert "below-local" in (tmp_path / "table/table.md").read_text()


def test_scores_of_single_examples_are_kept_and_their_mean_is_the_score(tree, tmp_path):
    done = experiment.train(from_dict(tree()), tmp_path / "run")
    lines = read_records(tmp_path / "run/test_scores.jsonl")
    assert [line["client"] for line in lines] == list(small_run.CLIENTS)
    for line in lines:
        for kind, scores in (("own", done["scores"]), ("base", done["base"]), ("rule", done["rule"])):
            assert len(line[kind]) == 12
            assert sum(line[kind]) / 12 == pytest.approx(scores["clients"][line["client"]], abs=1e-3)


def test_the_plan_says_what_the_table_costs(tree, tmp_path, llm_fed):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(tree()))
    said = llm_fed("run", path, "--dry-run", "--out", tmp_path / "run")
    words = "3 models on the test examples of 3 clients: 6 evaluations beside the test, with 72 answers"
    assert f"cross      {words}" in said.out
    assert "cross      none: all clients have the same model" in llm_fed(
        "run", path, "method=fedit", "--dry-run", "--out", tmp_path / "run"
    ).out  # fmt: skip


def built(tree):
    return prepare(from_dict(tree), Reporter())


def test_of_more_than_eight_clients_a_sample_is_asked_unless_all_are_wanted():
    base = {"name": str(ASSETS / "tiny-base"), "dtype": "float32"}
    tree = {"base": base, "task": {"name": "planted"}, "method": {"name": "local"}, "device": "cpu"}
    plan = cross.planned(built(tree))
    assert len(plan.clients) == 8 and plan.of == 12 and plan.limit == 50 and plan.answers == 8 * 7 * 50
    assert "(a sample of 12; eval.cross=true takes all)" in plan.describe()
    every = cross.planned(built({**tree, "eval": {"cross": True, "limit": 20}}))
    assert len(every.clients) == 12
    assert cross.planned(built({**tree, "eval": {"cross": False}})).clients == ()


def test_clients_without_test_examples(small, tmp_path):
    """With `true` that is a mistake, and refused before anything is trained."""
    folder = small_run.write_data(tmp_path / "data", {"train": 4, "validation": 2, "test": 2})
    for file in sorted(folder.glob("*/test.jsonl"))[1:]:  # with none at all, a share of training would be held out
        file.unlink()
    tree = small.tree(task={"path": str(folder)}, method={"name": "local"})
    assert cross.planned(built(tree)).why == "it needs two clients with test examples"
    with pytest.raises(UserError, match="needs at least two clients with test examples, and 1 of"):
        experiment.train(from_dict({**tree, "eval": {**tree["eval"], "cross": True}}), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run/checkpoints").iterdir())


def test_with_privacy_by_example_no_table_is_made_and_the_run_says_why(tree, monkeypatch):
    assert from_dict({**tree(), "privacy": {"unit": "example", "clip": 1.0}}).privacy.by_example
    monkeypatch.setattr(PrivacyConfig, "by_example", True)
    assert "privacy.unit=example" in cross.planned(built(tree())).why


def test_own_steps_after_the_last_round_are_scored_as_the_rounds_are(tree, tmp_path):
    done = experiment.train(from_dict(tree(**own_steps.alone(after=2, name="fedlora"))), tmp_path / "run")
    lines = read_records(tmp_path / "run/metrics.jsonl")
    (after,) = [line for line in lines if line["kind"] == "after"]
    rounds = [line for line in lines if line["kind"] == "score" and line["split"] == "validation"]
    assert (after["what"], after["split"], after["round"]) == ("own steps", "validation", done["round"])
    assert [line["round"] for line in rounds] == [0, 1, 2] and after["loss"] != rounds[-1]["loss"]
    assert "mark of its own" in (tmp_path / "run/report.html").read_text()
    experiment.train(from_dict(tree(rounds=2)), tmp_path / "plain")
    assert all(line["kind"] != "after" for line in read_records(tmp_path / "plain/metrics.jsonl"))


def test_a_merge_is_scored_on_validation_too(tree, tmp_path):
    experiment.train(from_dict(tree(method={"name": "mean"})), tmp_path / "run")
    (after,) = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "after"]
    assert (after["what"], after["split"]) == ("the merge", "validation")


def test_rounds_say_how_updates_compare_and_the_report_shows_it(tree, tmp_path):
    experiment.train(from_dict(tree(method={"name": "fedit"}, rounds=2)), tmp_path / "run")
    rounds = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "round"]
    for line in rounds:
        assert line["updates"].keys() == small_run.CLIENTS.keys()
        assert all(norm > 0 and -1 <= cosine <= 1 for norm, cosine in line["updates"].values())
    assert "Updates of the clients by round" in (tmp_path / "run/report.html").read_text()
