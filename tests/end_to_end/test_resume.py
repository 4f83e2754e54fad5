"""A run that is killed with SIGKILL, again and again, ends as if nothing had happened."""

import shutil
import signal
from pathlib import Path

import every
import own_steps
import pytest
from small_process import Kill, llm_fed

from llm_fed.runs.records import timed_rounds

ROUNDS = 3
CONFIG = {"rounds": ROUNDS, "checkpoint": {"keep": 1}}
METHODS = {
    "local": {"name": "local"},
    "fedlora": own_steps.alone(after=ROUNDS)["method"],
    "fedmerge": {"name": "fedmerge", "num_models": 3},
    "ca2fl": {"name": "ca2fl", "buffer": 2},
    "stopping": own_steps.alone(after=ROUNDS)["method"],  # its rule ends it after round 2 of 3
}
STOPS_AFTER = {"stopping": 2}
SECTIONS = {
    "fedlora": {"rounds": ROUNDS + 1},
    "ca2fl": {"checkpoint": {"keep": 1}},
    "stopping": {"rounds": ROUNDS + 1, "stop": {"patience": 1, "min_delta": 100.0}},
}
# Where each process is killed, and the round with which the next one says that it continues (None: from the start).
CHAINS: dict[str, list[tuple[Kill, int | None]]] = {
    "fedmerge": [
        (Kill("llm_fed.engine.fit:FusedFit.step", 2), None),  # in the middle of round 1: nothing is saved yet
        (Kill("llm_fed.engine.fit:FusedFit.step", 4), 2),  # in the middle of round 2
        (Kill("os:fsync", match="state.safetensors"), 2),  # a checkpoint's file is written, not yet safe
        (Kill("os:replace", match="checkpoints/round-0002"), 2),  # it is complete under its temporary name
        (Kill("llm_fed.runs.folder:Run.log_timing"), 3),  # between rounds
    ],
    "ca2fl": [
        (Kill("os:fsync", match="checkpoints/rows"), None),  # rows are written before the checkpoint of round 1
        (Kill("llm_fed.runs.folder:Run.log_timing"), 2),
        (Kill("llm_fed.runs.rows:RowStore.row", 3), 2),  # the server's memory of round 2 is begun
        (Kill("pathlib:Path.unlink", match="checkpoints/rows"), 3),  # rows that those of round 2 replace are deleted
    ],
    "fedlora": [
        (Kill("llm_fed.engine.fit:FusedFit.step", 2 * ROUNDS + 2), ROUNDS),  # while clients finish
        (Kill("llm_fed.engine.generation:generate"), ROUNDS),  # while they are tested
        (Kill("llm_fed.export.peft_folders:contents", 2), ROUNDS),  # one adapter is written, under another name
        (Kill("os:replace", match="adapters/.bob.partial"), ROUNDS),
        (Kill("llm_fed.experiment.finish:write_report"), ROUNDS),  # all is there but the report
        (Kill("os:replace", match="summary.json"), ROUNDS),  # all is there but the summary
    ],
    "stopping": [
        (Kill("llm_fed.federation.loop:save", 2), 2),  # the rule has said it, and no checkpoint holds it
        (Kill("os:replace", match="checkpoints/round-0002"), 2),
        (Kill("llm_fed.federation.loop:end_early"), 2),
        (Kill("os:replace", match="ended.json"), 2),
        (Kill("llm_fed.experiment.finish:write_report"), 2),
    ],
}


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory):
    """By method the folder of a run that nobody disturbed, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp(method) / "run"
            assert start(small, method, made[method]) == (0, None)
        return made[method]

    return folder


def start(small, method: str, out: Path, kill: Kill | None = None, *options: str) -> tuple[int, int | None]:
    """The command's exit code, and the round with which it said that it continues."""
    changes = {**CONFIG, **SECTIONS.get(method, {})}
    config = small.as_usual().config(out.parent / "config.yaml", method=METHODS[method], **changes)
    log = out.parent / "log"
    code = llm_fed(["run", str(config), "--out", str(out), *options], log, kill)
    said = [line.split()[-1] for line in log.read_text().splitlines() if "continuing at round" in line]
    assert len(said) <= 1 and "Traceback" not in log.read_text(), log.read_text()
    return code, int(said[0]) if said else None


def results(folder: Path) -> dict[str, bytes]:
    """What must not depend on how often a run was killed: every file but checkpoints and times."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)): path for path in paths}
    assert "report.html" in names and not [name for name in names if "partial" in name]
    skipped = ("checkpoints/", "timing.jsonl", "report.html", "delivered.json", ".lock")
    return {name: path.read_bytes() for name, path in sorted(names.items()) if not name.startswith(skipped)}


def rounds_of(folder: Path) -> list[int]:
    return [line["round"] for line in timed_rounds(folder)]


@pytest.mark.parametrize("method", every.quick(CHAINS, ["fedmerge", "stopping"]))
def test_killed_again_and_again(small, uninterrupted, tmp_path, method):
    """No round that a checkpoint holds is trained again: each has at most one line of timing, which is its last act."""
    whole, out = uninterrupted(method), tmp_path / "run"
    expected = None
    for kill, continues in CHAINS[method]:
        assert start(small, method, out, kill) == (-signal.SIGKILL, expected), kill
        expected = continues
    assert start(small, method, out) == (0, expected)
    assert results(out) == results(whole)
    assert rounds_of(whole) == list(range(1, STOPS_AFTER.get(method, ROUNDS) + 1))
    assert rounds_of(out) == sorted(set(rounds_of(out)))


@pytest.mark.slow
def test_killed_while_fresh_deletes_the_earlier_run(small, uninterrupted, tmp_path):
    """What is left never passes for a complete run, nor for a stranger's folder."""
    whole, out = uninterrupted("local"), tmp_path / "run"
    shutil.copytree(whole, out)
    for kill in (
        Kill("shutil:rmtree", match="/adapters"),
        Kill("pathlib:Path.unlink", match="metrics.jsonl"),
        Kill("shutil:rmtree", match="/checkpoints"),
    ):
        assert start(small, "local", out, kill, "--fresh") == (-signal.SIGKILL, None)
        assert not (out / "summary.json").exists()
    assert start(small, "local", out, None, "--fresh") == (0, None)
    assert results(out) == results(whole)


@pytest.mark.slow
def test_killed_while_an_ended_run_goes_on(small, uninterrupted, tmp_path):
    """Whatever was replaced by then, `--continue` goes on, and ends as where nobody disturbed it."""
    out, whole = tmp_path / "run", tmp_path / "whole/run"
    for folder in (out, whole):
        shutil.copytree(uninterrupted("stopping"), folder)
    assert start(small, "stopping", whole, None, "--continue") == (0, 3)
    for kill in (
        Kill("os:replace", match="continued.json"),
        Kill("pathlib:Path.unlink", match="ended.json"),
        Kill("llm_fed.federation.loop:save"),
        Kill("os:replace", match="adapters/.bob.partial"),
        Kill("os:replace", match="summary.json"),
    ):
        assert start(small, "stopping", out, kill, "--continue")[0] == -signal.SIGKILL, kill
    assert start(small, "stopping", out)[0] == 0  # it has said so before
    assert results(out) == results(whole) and not (out / "ended.json").exists()
