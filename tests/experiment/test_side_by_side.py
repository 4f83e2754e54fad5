"""Which runs of a comparison are trained at the same time: with processes that only pretend, and end in any order."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from llm_fed.basics.errors import UserError
from llm_fed.commands.comparison import ComparisonPlan
from llm_fed.experiment import side_by_side, trainer
from llm_fed.experiment.job import Job
from llm_fed.experiment.side_by_side import SideBySide
from llm_fed.runtime.portable import Codec
from llm_fed.settings import configfile

ROWS = {
    "local": ["method=local"],
    "fedit": ["method=fedit"],
    "same": ["method=fedavg"],
    "potara": ["method=potara"],
    "mean": ["method=mean"],
    "slow local": ["method=local", "local.lr=0.01", "local.lr_end=0.01"],
    "merged": ["method=potara", "local.lr=0.01", "local.lr_end=0.01"],
    "fedmerge": ["method=fedmerge"],
}


class Pretended:
    """Processes in the place of real ones, which reply in a random order, fail or die."""

    def __init__(self, jobs: list[Job], chance: random.Random):
        self.jobs, self.chance = {job.folder.name: job for job in jobs}, chance
        self.running: dict[Pretended.Process, Job] = {}
        self.most = 0
        self.began: list[str] = []
        self.beside: dict[str, set[str]] = {}  # what was trained when a run began
        self.fails, self.dies = set[str](), set[str]()

    class Process:
        def __init__(self, place: Pretended):
            self.place, self.runs = place, True

        def order(self, name, data):
            job = self.place.jobs[name]
            assert Codec().unpack(data).config == job.config
            assert self.runs
            self.name = name
            self.place.begins(self, job)

        def reply(self):
            del self.place.running[self]
            self.runs = self.place.chance.random() < 0.9  # else it is killed while it has nothing to do
            if self.name in self.place.dies:
                return None
            return Codec().pack("it failed" if self.name in self.place.fails else "")

        def end(self):
            return -9

        def say_all(self, say):
            say(self.name, "its last words")

    def begins(self, process: Process, job: Job) -> None:
        assert not job.outcome and process not in self.running
        assert all(isinstance(parent.outcome, dict) for parent in job.parents.values())
        opened = [id(parent) for other in [job, *self.running.values()] for parent in other.parents.values()]
        assert max(Counter(opened).values(), default=1) == 1  # two merges would open one folder
        self.beside[job.folder.name] = {other.folder.name for other in self.running.values()}
        self.running[process] = job
        self.most = max(self.most, len(self.running))
        self.began.append(job.folder.name)

    def next_reply(self, workers, say):
        assert {*workers} == {*self.running}
        return self.chance.choice([*workers])


@pytest.fixture
def train(small, tmp_path, monkeypatch):
    """Train the rows side by side with pretended processes: what became of each job, and the processes."""

    planned: dict[tuple, list[Job]] = {}

    def call(rows, seeds=(0, 1), processes=2, number=0, fails=(), dies=()):
        if (key := (*rows, *seeds)) not in planned:
            path = tmp_path / "c.yaml"
            path.write_text(yaml.safe_dump({**small.tree(), "compare": {"rows": rows}}, sort_keys=False))
            planned[key] = [*ComparisonPlan(path, [], [], seeds, tmp_path / "out").jobs()]
        for job in (jobs := planned[key]):
            job.outcome = ""
        made = Pretended(jobs, random.Random(number))
        made.fails, made.dies = set(fails), set(dies)
        begun: list[Job] = []
        with monkeypatch.context() as patch:
            patch.setattr(side_by_side, "ChildProcess", lambda module, environment: made.Process(made))
            patch.setattr(side_by_side, "next_reply", made.next_reply)
            patch.setattr(side_by_side, "end_all", lambda workers, say: None)
            patch.setattr(Job, "read", lambda job: setattr(job, "outcome", {"base": {"metric": "rouge1"}}))
            reporter = side_by_side.Reporter(Console(quiet=True))
            runs = SideBySide(jobs, [{}] * processes, tmp_path / "out", reporter, begun.append)
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
    """A run fails whose parents have failed, and no other; a process that has died is replaced."""
    alone, _ = train(ROWS)
    chance = random.Random(0)
    for number in range(20):
        wrong = chance.sample(sorted(alone), 4)
        outcomes, made = train(ROWS, processes=3, number=number, fails=wrong[:2], dies=wrong[2:])
        for name, outcome in outcomes.items():
            bad = {parent.folder.name for parent in made.jobs[name].parents.values()} & {*wrong}
            assert isinstance(outcome, str) == bool(name in wrong or bad), name
            if bad:
                assert outcome.startswith("its ") and "run failed" in outcome and name not in made.began
            elif name in wrong[2:]:
                assert "killed (SIGKILL)" in outcome and "--jobs" in outcome


def test_which_local_run_another_one_finds_does_not_depend_on_who_ends_first(train):
    """With several on the same data, those before it in the order have ended when a run begins, and none after it."""
    for number in range(20):
        _, made = train(ROWS, seeds=[0], processes=9, number=number)
        order = {name: place for place, name in enumerate(made.began)}
        names = ["local-seed0", "fedit-seed0", "slow-local-seed0", "fedmerge-seed0"]
        for before, after in pairwise(names):
            assert order[before] < order[after] and before not in made.beside[after]
        _, one = train({"fedit": ["method=fedit"], "local": ["method=local"]}, seeds=[0], number=number)
        assert one.most == 2  # a single one waits for nobody


def test_what_a_run_prints_is_kept(train, tmp_path):
    outcomes, _ = train(ROWS, seeds=[0], dies=["fedit-seed0"])
    logs = tmp_path / "out/logs"
    log = (logs / "fedit-seed0.log").read_text()
    assert log.startswith("--- 2") and str(Path("out/fedit-seed0")) in log and log.endswith("its last words\n")
    assert not (logs / "potara-seed0.log").exists() and outcomes["potara-seed0"].startswith("its fedit run failed")


@pytest.mark.parametrize(
    "error, reply, printed",
    [
        (TypeError("a fault\nof the program"), "TypeError: a fault of the program", "Traceback"),
        (UserError("two\nlines"), "two lines", ""),
        (None, "", ""),
    ],
)
def test_what_a_process_replies(small, tmp_path, monkeypatch, capsys, error, reply, printed):
    """It remembers what other runs have scored, and goes on after every failure."""
    remembered = []

    def attempt(config, folder, parents, reporter, base, contents, baselines):
        assert (folder, parents) == (tmp_path / "run", {"fedit": tmp_path / "fedit"}) and base.reuse is not None
        if error:
            raise error
        return {"round": 3}

    monkeypatch.setattr(trainer, "attempt", attempt)
    train = trainer.Trainer()
    monkeypatch.setattr(train.baselines, "remember", lambda *finished: remembered.append(finished))
    config = configfile.load(small.tree())
    finished = (config, {"metric": "rouge1"}, str(tmp_path / "other"))
    order = trainer.RunOrder(config, str(tmp_path / "run"), {"fedit": str(tmp_path / "fedit")}, [finished])
    assert Codec().unpack(train(Codec().pack(order))) == reply
    assert remembered == [(config, {"base": {"metric": "rouge1"}}, tmp_path / "other")]
    said = capsys.readouterr().err
    assert printed in said and ("Traceback" in said) == bool(printed)
