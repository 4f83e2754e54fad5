"""Which runs of a comparison are trained at the same time: with processes that only pretend, and end in any order."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import yaml

from llm_fed.commands.comparison import ComparisonPlan
from llm_fed.commands.section import read_rows
from llm_fed.experiment import side_by_side
from llm_fed.experiment.job import Job
from llm_fed.experiment.side_by_side import SideBySide
from llm_fed.settings import configfile

ROWS = {
    "local": ["method=local"], "fedit": ["method=fedit"], "same": ["method=fedavg"], "potara": ["method=potara"],
    "mean": ["method=mean"], "slow local": ["method=local", "local.lr=0.01", "local.lr_end=0.01"],
    "merged": ["method=potara", "local.lr=0.01", "local.lr_end=0.01"], "fedmerge": ["method=fedmerge"],
}  # fmt: skip


class Pretended:
    """Processes in the place of real ones, which end in a random order, fail or die."""

    def __init__(self, jobs: list[Job], chance: random.Random):
        self.jobs, self.chance = {str(job.folder): job for job in jobs}, chance
        self.running: dict[Pretended.Process, Job] = {}
        self.most = 0
        self.began: list[str] = []
        self.beside: dict[str, set[str]] = {}  # what was trained when a run began
        self.fails, self.dies = set[str](), set[str]()

    class Process:
        def __init__(self, place: Pretended, order, log: Path):
            self.place, self.log, self.returncode = place, log, None
            job = self.place.jobs[order["folder"]]
            assert configfile.from_dict(order["config"]) == job.config
            assert order["parents"] == {name: str(parent.folder) for name, parent in job.parents.items()}
            self.name = job.folder.name
            self.place.begins(self, job)

        def end(self):
            assert self not in self.place.running

        def wait(self):
            raise AssertionError("it still runs")

        def poll(self):
            if self.returncode is None and self.place.chance.random() < 0.3:
                del self.place.running[self]
                with open(self.log, "a") as log:
                    log.write("it failed\n" if self.name in self.place.fails else "its last words\n")
                self.returncode = 1 if self.name in self.place.fails else -9 if self.name in self.place.dies else 0
            return self.returncode

    def begins(self, process: Process, job: Job) -> None:
        assert not job.outcome and process not in self.running
        assert all(isinstance(parent.outcome, dict) for parent in job.parents.values())
        opened = [parent for other in [job, *self.running.values()] for parent in other.parents.values()]
        assert max(Counter(opened).values(), default=1) == 1  # two merges would open one folder
        self.beside[job.folder.name] = {other.folder.name for other in self.running.values()}
        self.running[process] = job
        self.most = max(self.most, len(self.running))
        self.began.append(job.folder.name)


@pytest.fixture
def train(small, tmp_path, monkeypatch):
    """Train the rows side by side with pretended processes: what became of each job, and the processes."""

    planned: dict[tuple, list[Job]] = {}

    def call(rows, seeds=(0, 1), processes=2, number=0, fails=(), dies=()):
        if (key := (*rows, *seeds)) not in planned:
            path = tmp_path / "c.yaml"
            path.write_text(yaml.safe_dump({**small.tree(), "compare": {"rows": rows}}, sort_keys=False))
            planned[key] = [*ComparisonPlan(read_rows(path, seeds=seeds), tmp_path / "out").jobs()]
        for job in (jobs := planned[key]):
            job.outcome = ""
        made = Pretended(jobs, random.Random(number))
        made.fails, made.dies = set(fails), set(dies)
        begun: list[Job] = []
        with monkeypatch.context() as patch:
            patch.setattr(side_by_side.time, "sleep", lambda seconds: None)
            patch.setattr(Job, "read", lambda job: setattr(job, "outcome", {"base": {"metric": "rouge1"}}))
            runs = SideBySide(jobs, [partial(made.Process, made)] * processes, tmp_path / "out", begun.append)
            ended = [job.folder.name for job in runs.trained()]
        assert sorted(ended) == sorted(job.folder.name for job in jobs)  # each once
        assert [job.folder.name for job in begun] == made.began
        return {job.folder.name: job.outcome for job in jobs}, made

    return call


def test_every_run_once_and_after_what_it_starts_from(train):
    """In whichever order they end; `Pretended.begins` looks at each."""
    for number in range(20):
        processes = (1, 2, 3, 9)[number % 4]
        outcomes, made = train(ROWS, processes=processes, number=number)
        assert all(outcomes.values()) and len(outcomes) == 2 * 8
        assert made.most <= processes
        assert processes > 3 or made.most == processes


def test_whatever_fails_the_others_are_trained(train):
    """A run fails whose parents have failed, and no other; a killed process is named as such."""
    alone, _ = train(ROWS)
    chance = random.Random(0)
    for number in range(20):
        wrong = chance.sample(sorted(alone), 4)
        outcomes, made = train(ROWS, processes=3, number=number, fails=wrong[:2], dies=wrong[2:])
        for name, outcome in outcomes.items():
            job = next(job for job in made.jobs.values() if job.folder.name == name)
            bad = {parent.folder.name for parent in job.parents.values()} & {*wrong}
            assert isinstance(outcome, str) == bool(name in wrong or bad), name
            if bad:
                assert outcome.startswith("its ") and "run failed" in outcome and name not in made.began
            elif name in wrong[:2]:
                assert outcome == "it failed"
            elif name in wrong[2:]:
                assert "killed (SIGKILL)" in outcome and "--jobs" in outcome


def test_all_runs_of_local_have_ended_before_another_begins(train):
    """So which of them it is compared with does not depend on who ends first."""
    for number in range(20):
        _, made = train(ROWS, seeds=[0], processes=9, number=number)
        assert {*made.began[:2]} == {"local-seed0", "slow-local-seed0"}
        assert not any(made.beside[name] & {*made.began[:2]} for name in made.began[2:])


def test_what_a_run_prints_is_kept(train, tmp_path):
    outcomes, _ = train(ROWS, seeds=[0], dies=["fedit-seed0"])
    logs = tmp_path / "out/logs"
    log = (logs / "fedit-seed0.log").read_text()
    assert log.startswith("--- 2") and str(Path("out/fedit-seed0")) in log and log.endswith("its last words\n")
    assert not (logs / "potara-seed0.log").exists() and outcomes["potara-seed0"].startswith("its fedit run failed")
