"""A round's models are what the run would have exported had it ended there, and nothing in the run's folder changes."""

import json
import shutil
from pathlib import Path
from typing import Any

import own_steps
import pytest
from equal_runs import weights
from hub_server import connected
from huggingface_hub.utils import validate_repo_id
from rich.console import Console

from llm_fed.basics.errors import UserError
from llm_fed.experiment import rounds
from llm_fed.experiment.rounds import LATEST, models_at, opened
from llm_fed.experiment.run import train
from llm_fed.runs.checkpoint import Checkpoints, Saved, rounds_in
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict

ROUNDS, KEPT = 4, 2
SAME_LR = {"steps": 2, "batch_size": 2, "lr": 0.02, "lr_end": 0.02}
METHODS: dict[str, dict[str, Any]] = {
    "fedit": {"method": {"name": "fedit"}},
    "own steps": {"method": {"name": "fedlora"}},
    "memories": {"method": {"name": "local"}},
    "late": {"method": {"name": "fedbuff", "buffer": 2}, "delay": {"sigma": 0.8}},
    "16 bits": {"method": {"name": "fedit"}, "transport": "bfloat16"},
}


def config(small, family: str, **changes: Any) -> Any:
    given = {"rounds": ROUNDS, "local": SAME_LR, "eval": {"select": "last", "every": 1}, **METHODS[family], **changes}
    if given["method"]["name"] == "fedlora":
        given |= own_steps.alone(after=given["rounds"], name=given["method"]["name"])
    given["checkpoint"] = {"keep": 1, "keep_rounds": [KEPT]}
    given["eval"] = {"max_new_tokens": 1, "cross": False, **given["eval"]}
    return from_dict(small.tree(**given))


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory):
    """By family the folder of a run, made when it is first asked for; not to be changed."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("run") / "run"
            train(config(small, family), made[family])
        return made[family]

    return folder


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


QUICK = ("own steps",)


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name not in QUICK)]
)
def test_it_is_what_a_run_of_so_many_rounds_exports(small, runs, tmp_path, family):
    run = runs(family)
    before = everything(run)
    train(config(small, family, rounds=KEPT), tmp_path / "short")
    with opened(f"{run}@{KEPT}") as folder:
        assert folder != run and weights(folder) == weights(tmp_path / "short")
        read = (folder / "adapters/ada/adapter_config.json").read_text()
        assert read == (tmp_path / "short/adapters/ada/adapter_config.json").read_text()
    assert not folder.exists()
    with opened(f"{run}@{ROUNDS}") as folder:
        assert weights(folder) == weights(run)
    assert everything(run) == before


def test_the_best_round_is_found_by_its_score(runs):
    of_last = runs("own steps")
    lines = [line for line in read_records(of_last / "metrics.jsonl") if line.get("split") == "validation"]
    best = max((line for line in lines if line["round"]), key=lambda line: (line["mean"], -line["loss"]))["round"]
    assert models_at(of_last, "best").round == best


def test_bad_places(small, runs, tmp_path, monkeypatch):
    run = runs("own steps")
    for named, said in (
        (f"{run}@3", r"has no checkpoint of round 3, only of 2, 4; checkpoint.keep_rounds=\[3\] keeps it"),
        (f"{run}@0", "has no checkpoint of round 0"),
        (f"{run}@last", "behind the @ stands the number of a round, or best"),
        (f"{tmp_path}/nowhere@3", "is not a run folder"),
    ):
        with pytest.raises(UserError, match=said), opened(named):
            raise AssertionError
    with pytest.raises(UserError, match="--client='dan' is unknown"), opened(f"{run}@2", ["dan"]):
        raise AssertionError
    with pytest.raises(UserError) as refused, opened(f"{run}@2") as folder:
        raise UserError(f"{folder} cannot chat")
    assert str(refused.value) == f"{run}@2 cannot chat"  # not the folder for the moment
    odd = tmp_path / "run@3"
    shutil.copytree(run, odd)
    with opened(odd) as folder:
        assert folder == odd  # a folder's own name


def test_a_merge_has_no_rounds(small, tmp_path):
    train(from_dict(small.tree(rounds=1, method={"name": "mean"}, eval={"max_new_tokens": 1})), tmp_path / "run")
    for at in ("1", "best"):
        with pytest.raises(UserError, match="is a merge.*llm-fed merge mean"), opened(f"{tmp_path / 'run'}@{at}"):
            raise AssertionError


def test_read_beside_its_writer_at_every_line(small, runs, tmp_path):
    """Nothing that the run writes depends on it, and what is read is whole."""
    found: list[int] = []

    class Reading(Reporter):
        def record(self, record: Any) -> None:
            if rounds_in(tmp_path / "run/checkpoints"):
                found.append(models_at(tmp_path / "run", LATEST, Reporter(Console(quiet=True))).round)

    whole = runs("own steps")
    train(config(small, "own steps"), tmp_path / "run", reporter=Reading())
    assert set(found) == set(range(1, ROUNDS + 1)) and found == sorted(found)
    skipped = ("timing.jsonl", "report.html", "delivered.json", ".lock")
    mine, other = (
        {
            name.removeprefix(str(folder)): data
            for name, data in everything(folder).items()
            if not name.endswith(skipped)
        }
        for folder in (tmp_path / "run", whole)
    )
    assert mine == other


def test_a_checkpoint_that_is_deleted_meanwhile_is_looked_for_anew(runs, monkeypatch):
    """Round 3 goes as soon as it was chosen."""
    run, read = runs("own steps"), []

    class Reading(Checkpoints):
        def load(self, round: int) -> Saved:
            read.append(round)
            return super().load(round)

    monkeypatch.setattr(rounds, "rounds_in", lambda folder: rounds_in(folder) if read else [2, 3])
    monkeypatch.setattr(rounds, "Checkpoints", Reading)
    assert models_at(run, LATEST, Reporter(Console(quiet=True))).round == ROUNDS
    assert read == [3, ROUNDS]


def test_best_needs_validation(small, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(small.data, data)
    for file in data.glob("*/validation.jsonl"):
        file.unlink()
    given = {"task": {"path": str(data), "validation": 0.0}, "eval": {"every": 1}}
    train(config(small, "fedit", rounds=2, **given), tmp_path / "run")
    with pytest.raises(UserError, match="no validation example was scored"), opened(f"{tmp_path / 'run'}@best"):
        raise AssertionError
    given = {"eval": {"every": 1, "during": "test"}}
    train(config(small, "fedit", rounds=2, **given), tmp_path / "tested")
    with pytest.raises(UserError, match="train with eval.during=validation"), opened(f"{tmp_path / 'tested'}@best"):
        raise AssertionError
    shutil.rmtree(tmp_path / "tested/checkpoints")
    with pytest.raises(UserError, match="give .*/tested, which holds what"), opened(f"{tmp_path / 'tested'}@best"):
        raise AssertionError


def test_every_command_takes_a_round(small, runs, tmp_path, llm_fed):
    run = runs("own steps")
    train(config(small, "own steps", rounds=KEPT), tmp_path / "short")
    before = everything(run)
    done = json.loads((tmp_path / "short/summary.json").read_text())["scores"]
    said = llm_fed("eval", f"{run}@{KEPT}", "--json")
    assert said.code == 0 and json.loads(said.out)["clients"] == done["clients"], said.err
    assert json.loads(said.out)["losses"] == done["losses"] and f"the models of round {KEPT} of {ROUNDS}" in said.err
    said = llm_fed("eval", f"{run}@{KEPT}", "--cross", "--json")
    assert said.code == 0 and [row[n] for n, row in enumerate(json.loads(said.out)["scores"])] == pytest.approx(
        [*done["clients"].values()], abs=1e-4
    )
    said = llm_fed("export", f"{run}@{KEPT}", tmp_path / "copies", "--client", "bob")
    assert said.code == 0 and [path.name for path in (tmp_path / "copies").iterdir()] == ["bob"]
    name = "bob/adapter_model.safetensors"
    assert (tmp_path / "copies" / name).read_bytes() == (tmp_path / "short/adapters" / name).read_bytes()
    said = llm_fed("merge", "mean", "--fed", f"{run}@{KEPT}", "--local", f"{run}@best", "--out", tmp_path / "merged")
    assert said.code == 0, said.err
    assert everything(run) == before
    llm_fed("eval", f"{run}@3").assert_refused("only of 2, 4", "llm-fed run --fresh")


def test_chat_takes_a_round_and_a_run_that_goes_on(small, runs, tmp_path, llm_fed, monkeypatch):
    import io

    run = tmp_path / "run"
    shutil.copytree(runs("own steps"), run)
    for question in (f"{run}@{KEPT}", f"{run}@best"):
        monkeypatch.setattr("sys.stdin", io.StringIO("w20 w21\n/client bob\nw20 w21\n"))
        assert llm_fed("chat", question).code == 0
    (run / "summary.json").unlink()
    shutil.rmtree(run / "adapters")
    before = everything(run)
    monkeypatch.setattr("sys.stdin", io.StringIO("w20 w21\n"))
    said = llm_fed("chat", run)
    assert said.code == 0 and f"the models of round {ROUNDS} of {ROUNDS}, the newest that it has kept" in said.err
    assert everything(run) == before


@pytest.mark.parametrize("at", [KEPT, "best"])
def test_a_round_is_pushed_under_names_that_the_hub_takes(runs, tmp_path, llm_fed, monkeypatch, at):
    run = runs("own steps")
    with connected(monkeypatch, tmp_path) as hub:
        said = llm_fed("push", f"{run}@{at}", "ann", "--client", "bob")
        assert said.code == 0, said.err
        (name,) = hub.repositories
        pushed = hub.repositories[name].files
    validate_repo_id(name)
    with opened(f"{run}@{at}") as folder:
        assert pushed["adapter_model.safetensors"] == (folder / "adapters/bob/adapter_model.safetensors").read_bytes()
