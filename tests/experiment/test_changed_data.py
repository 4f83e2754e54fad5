"""A run whose data have changed: what it trained on is not tested, what continues is defined, and the user is told."""

import json
import shutil
from pathlib import Path
from typing import Any

import growing
import numpy as np
import pytest
import yaml
from growing import key
from image_runs import Killer

from llm_fed import tasks
from llm_fed.audit.audit import audit
from llm_fed.basics.errors import RunError, UserError
from llm_fed.commands.compare import compare
from llm_fed.commands.finished import compare_runs
from llm_fed.commands.join import join
from llm_fed.commands.merge import merge_adapters
from llm_fed.commands.section import read_rows
from llm_fed.experiment import run, splits
from llm_fed.experiment.shown import shown
from llm_fed.runs.folder import SPLITS
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile
from llm_fed.settings.configfile import from_dict
from llm_fed.tasks.common import Example
from llm_fed.tasks.record import TRAINING, Record


def rows(client: str, numbers: range | list[int]) -> str:
    words = {"ada": "w4 w5", "bob": "w7 w8", "cyd": "w10 w11"}.get(client, "w12 w13")
    return "".join(json.dumps({"instruction": f"w{n % 40} w{20 + n // 40}", "output": words}) + "\n" for n in numbers)


@pytest.fixture
def data(tmp_path) -> Path:
    """Three clients with files of 20 rows, and no test split."""
    folder = tmp_path / "data"
    folder.mkdir()
    for client in ("ada", "bob", "cyd"):
        (folder / f"{client}.jsonl").write_text(rows(client, range(20)))
    return folder


@pytest.fixture
def tree(small, data) -> Any:
    """The configuration as nested values, with changes."""
    quick = {"max_new_tokens": 2, "cross": False}
    return lambda **changes: small.tree(
        **{"rounds": 2, "local": {"steps": 1}, "eval": quick, **changes}
        | {"task": {"path": str(data), **changes.get("task", {})}}
    )


def grow(data: Path) -> None:
    """Ada gets 40 rows, which stand before the others, and bob loses one."""
    (data / "ada.jsonl").write_text(rows("ada", [*range(100, 140), *range(20)]))
    (data / "bob.jsonl").write_text(rows("bob", range(1, 20)))


CHANGED = "40 rows are new, 1 row is gone"


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_records(folder / "metrics.jsonl") if line["kind"] == kind]


def trained(folder: Path) -> Record:
    record = splits.recall(folder)
    assert record is not None
    return record


def test_a_run_that_goes_on_keeps_its_rows_where_they_were_and_says_what_changed(tree, data, tmp_path, capsys):
    run.train(from_dict(tree()), tmp_path / "run")
    before = trained(tmp_path / "run")
    assert "the data have changed" not in capsys.readouterr().err
    grow(data)
    with growing.built() as built:
        run.train(from_dict(tree(rounds=4)), tmp_path / "run")
    said = capsys.readouterr().err
    assert f"the data have changed: {CHANGED}. Rows that the run knows stay in their splits" in said
    assert "the validation examples are others now, so the search for the best round starts again" in said
    after = trained(tmp_path / "run")
    assert ((after.splits_of(before.digests) ^ before.splits_of(before.digests)) == 0).all()
    assert built[0].held and not built[0].held & built[0].trained
    (event,) = of_kind(tmp_path / "run", "event")
    assert (event["round"], event["event"], event["reason"]) == (2, "data changed", CHANGED)
    (anew,) = of_kind(tmp_path / "run", "search anew")
    assert anew["round"] == 2 and list(anew["changed"]) == ["rows"]
    assert after.changes == ((2, CHANGED),)
    sizes = {line["client"]: line["examples"] for line in of_kind(tmp_path / "run", "client") if line["round"] == 4}
    assert sizes["ada"] > 30


def test_unchanged_data_are_no_reason_for_a_word_and_the_end_is_that_of_one_run(tree, data, tmp_path, capsys):
    run.train(from_dict(tree()), tmp_path / "once")
    with pytest.raises(KeyboardInterrupt):
        run.train(from_dict(tree()), tmp_path / "twice", reporter=Killer(2))
    for file in data.iterdir():
        shutil.copy(file, file.with_name("copy"))
        file.with_name("copy").replace(file)  # another time and another inode
    capsys.readouterr()
    run.train(from_dict(tree()), tmp_path / "twice")
    assert "the data have changed" not in capsys.readouterr().err
    for name in ("metrics.jsonl", SPLITS):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


def test_examples_are_shown_in_the_splits_that_the_run_has(tree, data, tmp_path):
    """`--dry-run --show`."""
    config, folder = from_dict(tree()), tmp_path / "run"

    def splits_of(place: Path, *, fresh: bool = False) -> dict[tuple[str, str], set[str]]:
        found: dict[tuple[str, str], set[str]] = {}  # to the tiny tokenizer some words are one
        for each in shown(config, place, 99, fresh=fresh).examples:
            found.setdefault((each.client, each.text), set()).add(each.split)
        return found

    run.train(config, folder)
    before = splits_of(folder)
    assert set().union(*before.values()) == {"training", "validation", "test"}
    grow(data)
    after = splits_of(folder)
    kept = before.keys() & after.keys()
    assert len(kept) > 50 and all(after[row] <= before[row] for row in kept)
    anew = splits_of(tmp_path / "other")
    assert splits_of(folder, fresh=True) == anew and any(anew[row] != before[row] for row in kept)


def test_a_change_is_an_event_though_the_run_is_killed_before_its_next_checkpoint(tree, data, tmp_path):
    run.train(from_dict(tree(rounds=1)), tmp_path / "run")
    grow(data)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run.train(from_dict(tree(rounds=3)), tmp_path / "run", reporter=Killer(2))
    run.train(from_dict(tree(rounds=3)), tmp_path / "run")
    assert [line["reason"] for line in of_kind(tmp_path / "run", "event")] == [CHANGED]
    assert len(of_kind(tmp_path / "run", "search anew")) == 1 and len(trained(tmp_path / "run").changes) == 1


def test_a_run_without_a_round_begins_anew(tree, data, tmp_path, capsys):
    run.train(from_dict(tree()), tmp_path / "run")
    for name in ("metrics.jsonl", "summary.json", "digests.jsonl"):
        (tmp_path / "run" / name).unlink()
    shutil.rmtree(tmp_path / "run/checkpoints")
    (tmp_path / "run/checkpoints").mkdir()
    grow(data)
    run.train(from_dict(tree()), tmp_path / "run")
    assert "the data have changed" not in capsys.readouterr().err and not trained(tmp_path / "run").changes


def test_eval_tests_no_row_that_the_run_has_trained_on(tree, data, tmp_path, llm_fed):
    run.train(from_dict(tree()), tmp_path / "run")
    known = trained(tmp_path / "run")
    same = llm_fed("eval", tmp_path / "run")
    assert same.code == 0 and "data have changed" not in same.err
    grow(data)
    (data / "dan.jsonl").write_text(rows("dan", range(200, 220)))
    with growing.built() as built:
        said = llm_fed("eval", tmp_path / "run", "task.validation=0.4")
    assert said.code == 0 and "clients: dan is new; 60 rows are new, 1 row is gone" in said.err
    assert "task.validation divides only rows that the run does not know; the others stay in their splits" in said.err
    assert "dan came after the run and has no adapter there, so it is left out; llm-fed join makes one" in said.err
    before = known.digests[known.splits & TRAINING > 0]
    (one,) = built
    texts = {key(*json.loads(line).values()) for line in rows("ada", range(20)).splitlines()}
    assert len(before) > 30 and texts & one.trained and not one.held & one.trained
    assert trained(tmp_path / "run").as_json() == known.as_json()  # scoring writes nothing
    only = llm_fed("eval", tmp_path / "run", "task.groups=[ada, bob]")
    assert only.code == 0 and "data have changed" not in only.err  # the others are not gone, but not asked for


def test_an_adapter_in_no_run_knows_no_rows(tmp_path):
    for folder in (tmp_path / "adapters/ada", tmp_path / "adapters", Path("/"), Path("/ada")):
        assert splits.recall_around(folder) is None


def test_eval_of_rows_that_are_written_in_other_words_warns(tree, data, tmp_path, llm_fed):
    run.train(from_dict(tree(rounds=1)), tmp_path / "run")
    for file in data.iterdir():
        file.write_text(file.read_text().replace('"w', '"w30 w'))
    said = llm_fed("eval", tmp_path / "run")
    assert said.code == 0 and "none of the rows is one that the run knows" in said.err


def test_an_adapter_of_a_run_is_not_tested_on_what_the_run_has_trained_on(tree, data, small, tmp_path, llm_fed):
    """As a task with another seed than the run's; of a single file, which is scored as it is, a note says so."""
    run.train(from_dict(tree(rounds=1, seed=3)), tmp_path / "run")
    one = ("eval", "--base", small.base, "--adapter", tmp_path / "run/adapters/ada", "eval.max_new_tokens=1")
    with growing.built() as built:
        said = llm_fed(*one, "--task", "files", "--data", data)
    assert said.code == 0 and "trained on" not in said.err
    record = trained(tmp_path / "run")
    assert built[0].held and not built[0].held & built[0].trained
    count = record.trained(tasks.load(from_dict(tree(rounds=1, seed=3)).task, 3).clients["ada"].train)
    said = llm_fed(*one, "--data", data / "ada.jsonl")
    assert f"{count} of the examples that are scored were trained on by this adapter's run" in said.err
    (tmp_path / "other.jsonl").write_text(rows("ada", range(200, 210)))
    assert "trained on" not in llm_fed(*one, "--data", tmp_path / "other.jsonl").err


def test_a_merge_knows_what_its_parents_have_trained_on(tree, data, tmp_path):
    """The data change between the federated run and the local one, which is trained later."""
    run.train(from_dict(tree(method={"name": "potara"})), tmp_path / "run")
    fed = trained(tmp_path / "run/needs/fedit")
    assert fed.as_json() == trained(tmp_path / "run").as_json() == trained(tmp_path / "run/needs/local").as_json()
    grow(data)
    with growing.built() as built:
        run.train(configfile.from_dict(tree(method={"name": "potara"}, rounds=3)), tmp_path / "run")
    assert len(built) > 2 and not {row for one in built for row in one.held} & {r for one in built for r in one.trained}
    assert [line["event"] for line in of_kind(tmp_path / "run", "event")] == ["data changed"]


@pytest.mark.parametrize("start", [".", "adapters", "adapters/ada"])
def test_a_run_that_starts_from_another_does_not_test_its_rows(tree, data, tmp_path, start):
    with growing.built() as first:
        run.train(from_dict(tree(seed=1)), tmp_path / "first")
    adapter = {"adapter": {"start": str(tmp_path / "first" / start)}}
    with growing.built() as second:
        run.train(from_dict(tree(seed=2, **adapter)), tmp_path / "second")
    assert first[0].trained and second[0].held and not second[0].held & first[0].trained


@pytest.mark.parametrize("whose", ["task", "file"])
def test_a_merge_of_folders_holds_no_row_out_that_their_runs_have_trained_on(tree, data, tmp_path, whose):
    runs = {option: tmp_path / method for option, method in (("fed", "fedit"), ("local", "local"))}
    for folder in runs.values():
        run.train(from_dict(tree(method={"name": folder.name}, seed=3)), folder)
    fed, local = (str(folder / "adapters/ada") for folder in runs.values())
    given = ["task.name=files", f"task.path={data}"] if whose == "task" else [f"task.path={data / 'ada.jsonl'}"]
    with growing.built() as built:
        words = [*given, "task.template=plain", "task.max_length=64"]
        merge_adapters("grid", fed, local, tmp_path / "out", client="ada", words=words)
    (one,) = built
    assert one.held and not one.held & one.trained
    held = np.array([Example(prompt, (answer,)).digest for prompt, answer in one.held], np.uint64)
    assert not (trained(runs["fed"]).splits_of(held) & TRAINING).any()


def test_a_newcomer_holds_no_row_out_that_the_run_has_trained_on(tree, data, tmp_path):
    task = {"validation": 0.4}
    run.train(from_dict(tree(method={"name": "potara"}, task=task)), tmp_path / "run")
    known = trained(tmp_path / "run")
    with growing.built() as built:
        join(tmp_path / "run", data / "ada.jsonl", tmp_path / "joined", steps=1)
    (one,) = built
    assert one.held and not one.held & one.trained
    texts = [json.loads(line) for line in (data / "ada.jsonl").read_text().splitlines()]
    digests = {key(*text.values()): Example(text["instruction"], (text["output"],)).digest for text in texts}
    held = np.array([digests[row] for row in one.held], np.uint64)
    assert not (known.splits_of(held) & TRAINING).any()


def test_an_audit_says_which_rounds_were_trained_on_other_data(tree, data, tmp_path):
    def unchecked() -> str:
        found = audit(tmp_path / "run", every=True)
        assert not found.findings
        return " ".join(found.unchecked)

    run.train(from_dict(tree(checkpoint={"keep": 9})), tmp_path / "run")
    assert not unchecked()
    grow(data)
    assert f"clients' training and scores: the data have changed since the run ({CHANGED})" in unchecked()
    run.train(from_dict(tree(rounds=4, checkpoint={"keep": 9})), tmp_path / "run")
    assert unchecked() == f"rounds 1 to 2, trained again: they were trained on other data ({CHANGED})"
    found = audit(tmp_path / "run", every=True)
    assert "rounds 3, 4, trained again" in found.checked and any("the end of the run" in line for line in found.checked)
    shutil.rmtree(tmp_path / "run/checkpoints/round-0002")
    assert "round 3: it depends on round 2, which was trained on other data, and there is no checkpoint" in unchecked()


def test_finished_runs_that_were_tested_on_other_rows_are_not_compared(tree, data, tmp_path):
    for seed in (0, 1):
        run.train(from_dict(tree(seed=seed, rounds=1)), tmp_path / f"fedit-{seed}")
        run.train(from_dict(tree(seed=seed, rounds=1, method={"name": "local"})), tmp_path / f"local-{seed}")
    folders = sorted(tmp_path.glob("[fl]*-?"))
    compare_runs(folders)
    shutil.rmtree(tmp_path / "local-1")
    grow(data)
    run.train(from_dict(tree(seed=1, rounds=1, method={"name": "local"})), tmp_path / "local-1")
    with pytest.raises(UserError, match="the same federation seed but other clients or other test examples"):
        compare_runs(folders)


def test_a_table_says_that_the_data_changed_between_its_runs(tree, data, tmp_path):
    path = tmp_path / "c.yaml"
    rows = {"fedit": ["method=fedit"], "local": ["method=local"]}
    path.write_text(yaml.safe_dump({**tree(rounds=1), "compare": {"seeds": [0], "rows": rows}}, sort_keys=False))
    compare(read_rows(path, chosen=["fedit"]), tmp_path / "out")
    assert "other examples" not in (tmp_path / "out/table.md").read_text()
    grow(data)
    compare(read_rows(path), tmp_path / "out")
    said = "With seed 0, fedit-seed0 and local-seed0 were tested on other examples, as the data changed in between"
    assert said in (tmp_path / "out/table.md").read_text()


def test_a_damaged_record_is_named(tree, data, tmp_path):
    run.train(from_dict(tree(rounds=1)), tmp_path / "run")
    path = tmp_path / "run" / SPLITS
    path.write_text(path.read_text().replace('"bob"', '"eve"'))
    with pytest.raises(
        RunError, match="splits.json is damaged: it does not match its checksum. It says which rows were"
    ):
        run.train(from_dict(tree(rounds=2)), tmp_path / "run")


def test_a_dry_run_says_what_changed_and_counts_as_the_run_would(tree, data, tmp_path, capsys):
    run.train(from_dict(tree(rounds=1)), tmp_path / "run")
    grow(data)
    plan = run.dry_run(from_dict(tree(rounds=2)), tmp_path / "run")
    assert CHANGED in capsys.readouterr().err
    run.train(from_dict(tree(rounds=2)), tmp_path / "run")
    sizes = [line["examples"] for line in of_kind(tmp_path / "run", "client") if line["round"] == 2]
    assert plan.example_counts["training"].total == sum(sizes)
