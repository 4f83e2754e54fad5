"""A run that ends before its last round, by its stop rule or by its user, is what a run of so many rounds is."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import own_steps
import pytest
from equal_runs import weights

from llm_fed.audit.audit import audit
from llm_fed.basics.errors import RunError, UserError
from llm_fed.experiment import unused
from llm_fed.experiment.ending import Ending
from llm_fed.experiment.run import train
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import check
from llm_fed.settings.configfile import from_dict, load

# With a constant learning rate a run that ends early is, to the last bit, a run of so many rounds.
SAME_LR = {"steps": 2, "batch_size": 2, "lr": 0.02, "lr_end": 0.02}
# Of seven rounds six are trained together, of ten nine, and then each takes the two steps of one alone.
OWN_STEPS = {"name": "fedlora", "personal_share": 1 / 7}
NEVER_BETTER = {"patience": 2, "min_delta": 100.0}  # the first scored round is the best


class Told(Reporter):
    """Keeps what it is told, and does something at a record."""

    def __init__(self, at: Any = lambda record: None):
        super().__init__()
        self.notes: list[str] = []
        self._at = at

    def note(self, text: str) -> None:
        self.notes.append(text)

    def record(self, record: Any) -> None:
        self._at(record)


def config(small, **changes: Any) -> Any:
    """Its answers are short, and no table says how each model answers the others' questions. `rounds` are those that
    clients train together."""
    given = {"rounds": 6, "method": OWN_STEPS, "local": SAME_LR, **changes}
    given["rounds"] += given["method"] == OWN_STEPS
    scored = {"select": "last", "every": 1, "max_new_tokens": 1, "cross": False, **changes.get("eval", {})}
    return from_dict(small.tree(**given | {"eval": scored}))


def press(folder: Path, round: int, times: int = 1) -> Told:
    """Presses Ctrl-C in a round, and again in the next one."""
    left = [round + n for n in range(times)]

    def at(record: Any) -> None:
        if left and (record["kind"], record.get("round")) == ("round", left[0]):
            left.pop(0)
            os.kill(os.getpid(), signal.SIGINT)

    return Told(at)


@pytest.fixture(autouse=True)
def ctrl_c():
    """A process in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def shorter(small, tmp_path_factory) -> Path:
    """A run of three rounds."""
    folder = tmp_path_factory.mktemp("shorter") / "run"
    train(config(small, **own_steps.alone(after=3)), folder)
    return folder


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    """A run of six rounds."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(config(small), folder)
    return folder


@pytest.fixture(scope="module")
def stopped(small, tmp_path_factory) -> Path:
    """A run of at most six rounds that its rule ends after the third."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(config(small, stop=NEVER_BETTER), folder)
    return folder


def test_a_stopped_run_is_a_shorter_run(small, shorter, stopped):
    done = json.loads((stopped / "summary.json").read_text())
    assert (done["round"], done["rounds"], done["ended"]["round"]) == (3, 6, 3)
    assert done["ended"]["why"].startswith("stop.patience=2: the validation score of round 1")
    assert done["scores"] == json.loads((shorter / "summary.json").read_text())["scores"]
    assert weights(stopped) == weights(shorter)
    assert (stopped / "metrics.jsonl").read_bytes() == (shorter / "metrics.jsonl").read_bytes()


def test_it_counts_as_finished_and_says_so(small, stopped, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    before, told = (folder / "summary.json").read_bytes(), Told()
    train(config(small, stop=NEVER_BETTER), folder, reporter=told)
    assert "it ended after round 3 of 6 (stop.patience=2" in told.notes[-1] and "--continue" in told.notes[-1]
    train(config(small, stop=NEVER_BETTER), folder, reporter=told, ending=Ending("--finish"))
    assert "it ended after round 3 of 6" in told.notes[-1]
    assert (folder / "summary.json").read_bytes() == before


def test_its_audit_finds_nothing_and_a_false_end_is_found(small, stopped, tmp_path):
    found = audit(stopped, every=True, reporter=Told())
    assert (found.findings, found.unchecked) == ([], [])
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    for name in ("summary.json", "ended.json"):
        value = json.loads((folder / name).read_text())
        value.pop("checksum", None)
        (value if name == "ended.json" else value["ended"])["why"] = "stop.patience=1: it looked bad"
        (folder / name).write_text(json.dumps(value))
    said = [finding.what for finding in audit(folder, sample=0, reporter=Told()).findings]
    assert any("does not follow from its scores" in what for what in said)


def test_continue_counts_anew_and_goes_on_as_if_it_had_not_ended(small, stopped, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    asked = config(small, stop=NEVER_BETTER)
    assert train(asked, folder, goes_on=True)["ended"]["round"] == 5  # two more rounds without an improvement
    found = audit(folder, every=True, reporter=Told())
    assert not found.findings and "unless it was another one then" not in " ".join(found.unchecked)
    done = train(asked, folder, goes_on=True)
    assert "ended" not in done and not (folder / "ended.json").exists()
    assert weights(folder) == weights(whole)
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    told = Told()
    train(asked, folder, goes_on=True, reporter=told)
    assert "is complete: 6 rounds" in told.notes[-1]


def test_another_rule_or_other_rounds_decide_anew(small, stopped, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    assert train(config(small, stop=NEVER_BETTER, rounds=9), folder)["ended"]["round"] == 3  # as one of nine would
    assert "ended" not in train(config(small), folder)
    assert weights(folder) == weights(whole)
    with pytest.raises(UserError, match=r"complete, so this change has no effect: stop.patience: None -> 2"):
        train(config(small, stop={"patience": 2}), folder)


def test_ctrl_c_once_ends_after_the_round_and_continue_goes_on(small, shorter, whole, tmp_path):
    folder, told = tmp_path / "run", press(tmp_path, 3)
    done = train(config(small), folder, reporter=told, ending=Ending(by_key=True))
    assert done["ended"] == {"round": 3, "why": "Ctrl-C"} and weights(folder) == weights(shorter)
    assert any("Ctrl-C again leaves it" in note for note in told.notes)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not audit(folder, every=True, reporter=Told()).findings
    train(config(small), folder, goes_on=True)
    assert weights(folder) == weights(whole) and not (folder / "continued.json").exists()
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_ctrl_c_twice_leaves_it_to_be_continued(small, whole, tmp_path):
    """The second one comes while the clients finish."""
    folder = tmp_path / "run"

    def at(record: Any) -> None:
        if (record["kind"], record.get("round")) in (("round", 2), ("score", 0)):
            os.kill(os.getpid(), signal.SIGINT)

    based = config(small, eval={"base": True})
    with pytest.raises(KeyboardInterrupt):
        train(based, folder, reporter=Told(at), ending=Ending(by_key=True))
    assert not (folder / "summary.json").exists()
    assert "ended" not in train(based, folder)
    assert weights(folder) == weights(whole)


def test_ctrl_c_interrupts_at_once_where_nobody_listens(small, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(config(small), tmp_path / "run", reporter=press(tmp_path, 2))


def test_finish_takes_what_there_is(small, shorter, whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="no checkpoint of any round"):
        train(config(small), folder, ending=Ending("--finish"))
    with pytest.raises(KeyboardInterrupt):
        train(config(small), folder, reporter=press(tmp_path, 4))
    done = train(config(small), folder, ending=Ending("--finish"))
    assert done["ended"] == {"round": 3, "why": "--finish"} and weights(folder) == weights(shorter)
    train(config(small), folder, goes_on=True)
    assert weights(folder) == weights(whole)


def test_what_has_not_begun_is_refused_and_so_is_finishing_what_has_no_round(small, tmp_path, llm_fed):
    file, folder = small.as_usual().config(tmp_path / "c.yaml"), tmp_path / "run"
    for flag in ("--finish", "--continue"):
        said = llm_fed("run", file, "--out", folder, flag)
        said.assert_refused(f"{folder} holds no run, and {flag} is for one that has begun; leave it out to train")
        assert not folder.exists()
    with pytest.raises(KeyboardInterrupt):
        train(load(file), folder, reporter=press(tmp_path, 1))
    said = llm_fed("run", file, "--out", folder, "--finish")
    said.assert_refused(f"but {folder} has no checkpoint of any round; leave it out to train")


def test_what_ends_between_two_scored_rounds_is_scored_there(small, tmp_path):
    folder, of = tmp_path / "run", {"eval": {"select": "best", "every": 2}}
    done = train(config(small, **of), folder, reporter=press(tmp_path, 3), ending=Ending(by_key=True))
    lines = [line for line in read_records(folder / "metrics.jsonl") if line["kind"] == "score"]
    scored = [line["round"] for line in lines if line["split"] == "validation" and line["round"]]
    assert scored == [2, 3] and done["round"] in scored
    train(config(small, **of), folder, goes_on=True)
    train(config(small, **of), tmp_path / "whole")
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_of_last_counts_back_from_where_the_run_ended(small, tmp_path):
    """The checkpoint of round 1 is gone, as it did not count in a run of six rounds."""
    of = {"eval": {"select": "best", "every": 1, "of_last": 2}}
    done = train(config(small, **of), tmp_path / "run", reporter=press(tmp_path, 3), ending=Ending(by_key=True))
    lines = read_records(tmp_path / "run/metrics.jsonl")
    by_round = {
        line["round"]: (line["mean"], -line["loss"])
        for line in lines
        if line.get("split") == "validation" and line["round"]
    }
    assert done["round"] == max((2, 3), key=lambda round: (by_round[round], round))


def test_a_damaged_best_round_can_be_left_for_the_last(small, tmp_path):
    """With such a rate the third round is not better than the second."""
    of = {"stop": NEVER_BETTER, "local": {**SAME_LR, "lr": 1.0, "lr_end": 1.0}}

    def damage(record):
        if (record["kind"], record.get("round")) == ("round", 3):
            for manifest in (tmp_path / "run/checkpoints").glob("round-*/manifest.json"):
                manifest.write_text("{")

    with pytest.raises(RunError, match="is damaged: .*; set eval.select=last"):
        train(config(small, **of, eval={"select": "best"}), tmp_path / "run", reporter=Told(damage))
    assert train(config(small, **of), tmp_path / "run")["round"] == 3


def test_the_end_is_done_again_after_the_same_round(small, shorter, tmp_path):
    """More adapters are asked for of a run that Ctrl-C has ended."""
    folder = tmp_path / "run"
    train(config(small, export={"clients": "none"}), folder, reporter=press(tmp_path, 3), ending=Ending(by_key=True))
    assert train(config(small), folder)["ended"]["round"] == 3
    assert weights(folder) == weights(shorter)


def test_rules_that_no_score_reaches_are_refused(small, tmp_path):
    with pytest.raises(UserError, match=r"stop.patience=2 waits for scores of validation examples"):
        train(_without_validation(small, tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for words, said in ({"every": 0}, "eval.every is 0"), ({"during": "test"}, "eval.during is 'test'"):
        with pytest.raises(UserError, match=said):
            check(config(small, stop={"patience": 2}, eval=words))
    with pytest.raises(UserError, match=r"stop.min_delta=1.0 would change nothing"):
        unused.check(config(small, stop={"min_delta": 1.0}))


def _without_validation(small, folder: Path) -> Any:
    data = folder / "data"
    shutil.copytree(small.data, data)
    for file in data.glob("*/validation.jsonl"):
        file.unlink()
    return config(small, stop={"patience": 2}, task={"path": str(data), "validation": 0.0})


def test_merges_end_with_their_parents(small, tmp_path):
    """Ctrl-C ends the rounds of the run that is trained; --finish finishes all of them."""
    folder, asked = tmp_path / "run", config(small, method={"name": "mean"}, rounds=3)
    told = press(tmp_path, 2)
    done = train(asked, folder, reporter=told, ending=Ending(by_key=True))
    assert done["ended"]["round"] == 2 and "(in the run of fed" in done["ended"]["why"]
    assert done["needs"] == {"fedit": 2, "local": 3}
    assert "ended" not in train(asked, folder, goes_on=True)
    train(asked, tmp_path / "whole")
    assert weights(folder) == weights(tmp_path / "whole")


def test_finish_finishes_all_that_a_merge_needs(small, tmp_path):
    folder, asked = tmp_path / "run", config(small, method={"name": "mean"}, rounds=3)
    seen: list[int] = []

    def at(record: Any) -> None:
        if record["kind"] == "round":
            seen.append(record["round"])
            if seen in ([1, 2], [1, 2, 2, 3, 1, 2]):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(asked, folder, reporter=Told(at))
    with pytest.raises(UserError, match="needs/local has no checkpoint of any round"):
        _finish_a_copy(folder, tmp_path, asked)
    with pytest.raises(KeyboardInterrupt):
        train(asked, folder, reporter=Told(at))
    done = train(asked, folder, ending=Ending("--finish"))
    assert done["needs"] == {"fedit": 3, "local": 1}
    assert done["ended"] == {"round": 1, "why": "--finish (in the run of local)"}
    train(asked, folder, goes_on=True)
    train(asked, tmp_path / "whole")
    assert weights(folder) == weights(tmp_path / "whole")


def _finish_a_copy(folder: Path, scratch: Path, asked: Any) -> None:
    shutil.copytree(folder, scratch / "copy", ignore=shutil.ignore_patterns(".lock*"))
    train(asked, scratch / "copy", ending=Ending("--finish"))


def test_a_round_that_is_merged_must_be_reached(small, tmp_path):
    merge = {"name": "mean", "fed_round": 3}
    asked = config(small, method=merge, rounds=4, checkpoint={"keep_rounds": [3]}, stop={**NEVER_BETTER, "patience": 1})
    with pytest.raises(RunError, match=r"merges round 3 of fedit, which has ended after round 2 \(Ctrl-C\)"):
        train(asked, tmp_path / "run", reporter=press(tmp_path, 2), ending=Ending(by_key=True))
    done = train(asked, tmp_path / "run", goes_on=True)
    assert done["needs"] == {"fedit": 3, "local": 2}  # the rule ends the local run alone
