"""`export.clients`: whose personal model is written at the end, and what is said where one is missing."""

import json
from pathlib import Path

import every
import pytest
import torch
import yaml
from equal_runs import adapters, assert_equal
from network import federate, lines, tree
from small_run import CLIENTS

from llm_fed.basics.errors import UserError
from llm_fed.commands.comparison import ComparisonPlan
from llm_fed.commands.section import read_rows
from llm_fed.experiment import finish
from llm_fed.experiment import run as experiment
from llm_fed.export.models import seen
from llm_fed.federation.progress import restore
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.settings.configfile import as_dict, from_dict

SPARSE = {
    "rounds": 2,
    "participation": 0.3,
    "eval": {"every": 0, "base": False, "max_new_tokens": 2},
    "seed": 2,
}  # one client per round


def exported(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("adapters/*") if not path.name.startswith("."))


def assert_same(one: Path, other: Path) -> None:
    assert_equal(one, other)
    assert (one / "summary.json").read_bytes() == (other / "summary.json").read_bytes()


def asked(run: Path) -> list[str]:
    return sorted({line["client"] for line in read_records(run / "metrics.jsonl") if line["kind"] == "client"})


def test_seen_is_of_whom_an_answer_had_arrived():
    """Ada's of round 1 comes two rounds late, bob was asked later, cyd never answered."""
    records = [
        {"kind": "client", "round": 1, "client": "ada", "staleness": 2},
        {"kind": "client", "round": 2, "client": "bob", "staleness": 0},
        {"kind": "drop-out", "round": 1, "client": "cyd"},
        {"kind": "event", "round": 1, "client": "cyd", "event": "client failed"},
    ]
    assert [seen(records, round) for round in (1, 2, 3)] == [set(), {"bob"}, {"ada", "bob"}]


def test_the_default_is_all_and_bad_settings_are_refused(small):
    assert as_dict(from_dict({}))["export"] == {"clients": "all"}
    assert from_dict({"export": {"clients": ["a", "b"]}}).export.clients == ("a", "b")
    for bad in ("ada", [], "sene", None, [1]):
        with pytest.raises(UserError, match=r"export\.clients is .*names in brackets|export\.clients is .*it takes"):
            from_dict({"export": {"clients": bad}})


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    """A run that asked two of the three clients at most, with everybody's model."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    experiment.train(from_dict(small.tree(**SPARSE)), folder)
    assert exported(folder) == sorted(CLIENTS) and 0 < len(asked(folder)) < 3
    return folder


def settings(small, clients: object, **changes: object):
    return from_dict(small.tree(**{**SPARSE, **changes, "export": {"clients": clients}}))


@pytest.mark.parametrize("clients", ["seen", ["cyd", "ada"]])
def test_only_those_are_written_and_nothing_else_changes(small, whole, tmp_path, clients):
    experiment.train(settings(small, clients), tmp_path / "run")
    expected = asked(whole) if clients == "seen" else sorted(clients)
    assert exported(tmp_path / "run") == expected
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (tmp_path / "run/summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    for client, tensors in adapters(tmp_path / "run").items():
        assert all(torch.equal(tensor, adapters(whole)[client][name]) for name, tensor in tensors.items())
    scored = json.loads((tmp_path / "run/summary.json").read_text())["scores"]["clients"]
    assert sorted(scored) == sorted(CLIENTS)


def test_a_name_that_nobody_has_is_refused_before_training(small, tmp_path):
    with pytest.raises(UserError, match="export.clients='bop' is unknown .the closest is 'bob'.; known: ada, bob, cyd"):
        experiment.train(settings(small, ["ada", "bop"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_seen_is_right_after_a_resume_and_the_setting_may_change(small, whole, tmp_path, monkeypatch):
    """Killed after round 1 with another setting; who was seen then is known from metrics.jsonl alone."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log_timing", stop)
        with pytest.raises(KeyboardInterrupt):
            experiment.train(settings(small, "none"), tmp_path / "run")
    first = asked(tmp_path / "run")
    experiment.train(settings(small, "seen"), tmp_path / "run")
    assert len(first) == 1 and exported(tmp_path / "run") == asked(whole) and set(first) <= set(asked(whole))


def test_only_rounds_up_to_the_exported_one_count(small, tmp_path, monkeypatch):
    """The first of two rounds is exported, so who was asked in the second alone is not seen."""

    def first(built, run, *_):
        return restore(run.checkpoints.load(1), built.clients, built.server)

    monkeypatch.setattr(experiment, "selected_round", first)
    done = experiment.train(settings(small, "seen", checkpoint={"keep_rounds": [1]}), tmp_path / "run")
    assert done["round"] == 1 and len(exported(tmp_path / "run")) == 1 < len(asked(tmp_path / "run"))


def test_an_end_that_was_killed_leaves_no_model_that_is_not_asked_for(small, whole, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finish, "write_summary", stop)
        with pytest.raises(KeyboardInterrupt):
            experiment.train(settings(small, "all"), tmp_path / "run")
    assert exported(tmp_path / "run") == sorted(CLIENTS)
    experiment.train(settings(small, ["bob"]), tmp_path / "run")
    assert exported(tmp_path / "run") == ["bob"]


def test_a_finished_run_exports_more_without_training(small, whole, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    experiment.train(settings(small, "none"), run)
    monkeypatch.setattr("llm_fed.engine.fit.FusedFit.step", None)  # nobody trains again
    for clients, expected in ((["bob"], ["bob"]), ("seen", asked(whole)), ("all", sorted(CLIENTS))):
        experiment.train(settings(small, clients), run)
        assert exported(run) == expected
    assert_same(run, whole)
    assert "export.clients has changed, so its end is done again" in capsys.readouterr().err
    experiment.train(settings(small, ["ada"]), run)  # fewer: there is nothing to do
    assert exported(run) == sorted(CLIENTS) and "is complete: 2 rounds" in capsys.readouterr().err


def test_without_checkpoints_it_says_so_and_loses_nothing(small, tmp_path):
    run = tmp_path / "run"
    experiment.train(settings(small, ["bob"]), run)
    for path in sorted((run / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match="no checkpoints any more.*--fresh"):
        experiment.train(settings(small, "all"), run)
    assert (run / "summary.json").exists() and exported(run) == ["bob"]


def test_commands_say_which_model_is_missing_and_what_to_do(small, llm_fed, tmp_path):
    config, run = small.config(tmp_path / "c.yaml", **SPARSE), tmp_path / "run"
    assert llm_fed("run", config, "export.clients=[bob]", "--out", run).code == 0
    again = f"llm-fed run {run}/config.yaml export.clients=all --out {run}"
    missing = ["no personal adapter of ada, cyd", "export.clients is ['bob']", again]
    llm_fed("eval", run).assert_refused(*missing)
    for command in (("export", run, tmp_path / "out"), ("push", run, "ann")):
        llm_fed(*command, "--client", "cyd").assert_refused("no personal adapter of cyd", again)
        llm_fed(*command, "--client", "cyt").assert_refused("--client='cyt' is unknown (the closest is 'cyd')")
    assert llm_fed("export", run, tmp_path / "out").code == 0 and exported(tmp_path) == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bob"]
    parents = ("--fed", run, "--local", run, "--out", tmp_path / "merged")
    llm_fed("merge", "mean", *parents).assert_refused("no personal adapter of ada", "export.clients=all")
    assert llm_fed("merge", "mean", *parents, "--client", "bob").code == 0

    assert llm_fed("run", config, "export.clients=none", "--out", tmp_path / "none").code == 0
    for command in (("eval", tmp_path / "none"), ("export", tmp_path / "none", tmp_path / "x")):
        llm_fed(*command).assert_refused("no personal adapter of", "export.clients is none")
    assert llm_fed(*again.split()[1:]).code == 0  # what the message said
    assert llm_fed("eval", run, "--json").code == 0
    first = json.loads((run / "summary.json").read_text())["scores"]["mean"]
    assert json.loads(llm_fed("eval", run, "--json").out)["mean"] == first


def test_what_a_merger_needs_is_exported(small, tmp_path):
    """POTARA merges what its runs export; of a round that is named it takes the checkpoint, and nothing is needed."""
    experiment.train(settings(small, "none", method={"name": "potara"}), tmp_path / "run")
    assert exported(tmp_path / "run") == []
    assert exported(tmp_path / "run/needs/fedit") == exported(tmp_path / "run/needs/local") == sorted(CLIENTS)
    at = {"name": "potara", "fed_round": 2, "local_round": 2}
    experiment.train(settings(small, "seen", method=at), tmp_path / "at")
    assert exported(tmp_path / "at") == asked(tmp_path / "at/needs/fedit")  # local asks the same clients
    assert exported(tmp_path / "at/needs/fedit") == exported(tmp_path / "at")
    experiment.train(settings(small, "all", method=at), tmp_path / "at")
    assert exported(tmp_path / "at") == sorted(CLIENTS)


def test_a_shared_run_that_exported_nothing_exports_what_is_needed(small, tmp_path, monkeypatch):
    """A row with `none` and a merger share one run; it is not trained twice, nor is one that is finished already."""
    rows = {"local": ["method=local"], "merged": ["method=potara"]}
    tree = small.tree(**SPARSE, export={"clients": "none"}) | {"compare": {"rows": rows}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    plan = ComparisonPlan(read_rows(tmp_path / "c.yaml"), tmp_path / "out")
    shared = plan.cells["local", 2]
    assert shared is plan.cells["merged", 2].parents["local"] and len(list(plan.jobs())) == 3
    assert shared.config.export.clients == "all" and plan.cells["merged", 2].config.export.clients == "none"
    experiment.train(
        from_dict(small.tree(**SPARSE, method={"name": "local"}, export={"clients": "none"})), tmp_path / "f"
    )
    monkeypatch.setattr("llm_fed.engine.fit.FusedFit.step", None)  # nobody trains again
    shared.folder = tmp_path / "f"
    shared.read()
    assert shared.outcome == ""  # it is finished, but what is needed of it is not there
    experiment.train(shared.config, tmp_path / "f")
    shared.read()
    assert shared.outcome
    assert exported(tmp_path / "f") == sorted(CLIENTS)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "clients, expected", every.quick([("none", []), (["bob"], ["bob"]), ("seen", None)], [("seen", None)])
)
def test_over_a_network_each_client_s_machine_writes_its_own(small, tmp_path, clients, expected):
    changes = {**SPARSE, "export": {"clients": clients}}
    federate(tmp_path, small, tree(small, **changes))
    places = tmp_path.glob("home-*/adapters/run/*")
    written = sorted(path.name for path in places if not path.name.startswith("."))
    answered = sorted({line["client"] for line in lines(tmp_path, "client")})
    assert written == (answered if expected is None else expected) and len(answered) < 3
