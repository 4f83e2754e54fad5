"""The runs of a comparison: every row of a configuration file with every seed, equal runs once, checked before any
begins."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from llm_fed import configfile, methods, paths, tasks
from llm_fed.commands import section
from llm_fed.config import Config, Dtype, ExportConfig
from llm_fed.errors import RunError, UserError
from llm_fed.eval.costs import Traffic, read_traffic
from llm_fed.eval.tables import Result
from llm_fed.eval.verdict import last_round
from llm_fed.experiment import run as experiment
from llm_fed.experiment.baselines import Baselines, shared_by
from llm_fed.experiment.needed import needed_config
from llm_fed.method import Method
from llm_fed.models import speed
from llm_fed.models.images import ImageBase
from llm_fed.models.loading import Base, settle_dtype
from llm_fed.plugins import short
from llm_fed.runs.folder import Run, holds_results
from llm_fed.runs.reading import events, saved_config
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import choose_device


@dataclass
class Job:
    """One run, which several rows may share."""

    config: Config
    method: Method
    folder: Path
    shown: str  # the folder as the table names it, seen from where the table lies
    needs: dict[str, Job] = field(default_factory=dict)  # by method name: runs that this one starts from
    outcome: dict[str, Any] | str = ""  # summary.json of a finished run; of a failed one the reason; "": still open

    def read(self) -> None:
        """Take over what lies on disk; UserError if the folder holds another run."""
        if self.folder.exists():
            with Run(self.folder, self.config) as run:
                done = run.summary()
                self.outcome = "" if done is None or experiment.lacks_exports(run) else done

    def train(self, reporter: Reporter, base: Base | ImageBase, baselines: Baselines) -> None:
        """Run it, or continue it, to its end. What goes wrong is its outcome."""
        for name, need in self.needs.items():
            if isinstance(need.outcome, str):
                self.outcome = f"its {name} run failed: {need.outcome}"
                return
        needed = {name: need.folder for name, need in self.needs.items()}
        try:
            self.outcome = experiment.train(
                self.config, self.folder, reporter=reporter, needed=needed, base=base, baselines=baselines
            )
        except (RunError, UserError, torch.OutOfMemoryError) as error:
            self.outcome = " ".join(str(error).split())

    def result(self) -> Result:
        """What the table shows of a finished run."""
        assert isinstance(self.outcome, dict)
        scores = self.outcome["scores"]
        return Result(
            folder=self.shown,
            round=self.outcome["round"],
            clients=scores.get("clients", {}),
            average=scores.get("mean"),
            worst_half=scores.get("worst_half"),
            base=self.outcome.get("base"),
            rule=self.outcome.get("rule"),
            shared=shared_by(self.config, scores.get("metric", "")),
            traffic=self._traffic(),
            federation=self.config.federation_seed,
            training=self.config.training_seed,
            last=last_round(self.folder, self.config),
            events=dict(self._events()),
        )

    def _events(self) -> Counter[str]:
        """What went wrong, here and in the runs that this one starts from."""
        return sum((need._events() for need in self.needs.values()), events(self.folder))

    def _traffic(self, last_round: int | None = None) -> Traffic:
        """Bytes up to a round; of a method that starts from other runs, theirs up to the rounds that it uses."""
        if not self.needs:
            return read_traffic(self.folder, last_round)
        assert isinstance(self.outcome, dict)
        used = self.outcome["needs"]
        return sum((need._traffic(used[name]) for name, need in self.needs.items()), Traffic())


class Plan:
    """Every run of a comparison, equal ones once, resolved and checked against what lies on disk."""

    def __init__(self, path: Path, words: Sequence[str], chosen: Sequence[str], seeds: Sequence[int], out: Path):
        given = section.read_rows(path, words, chosen, seeds)
        self.rows, self.seeds, self.budget, self._out = given.rows, given.seeds, given.budget, out
        # By digest: what an earlier command began there (under another label, perhaps), and what is planned.
        configs = sorted([*out.glob("*/config.yaml"), *out.glob("needs/*/config.yaml")])
        begun = {config.parent: saved_config(config.parent) for config in configs if holds_results(config.parent)}
        self._begun = {_digest(saved): folder for folder, saved in begun.items()}
        self._jobs: dict[str, Job] = {}
        self.cells: dict[tuple[str, int], Job] = {}  # by label and seed
        folders = _folder_names(self.rows)
        planned = {}
        for (label, seed), config in given.cells.items():
            with section.in_row(label):
                planned[label, seed] = replace(paths.absolute(config), method=methods.canonical(config.method))
        auto = _begun_dtype(list(planned.values()), list(begun.values()))
        self.notes: list[str] = []  # what a user should know before the first run
        self.file = self._settled(paths.absolute(given.file), auto)
        for (label, seed), config in planned.items():
            with section.in_row(label):
                self.cells[label, seed] = self._job(self._settled(config, auto), out / f"{folders[label]}-seed{seed}")
        for job in list(self._jobs.values()):
            self._link(job)
        owners: dict[Path, Job] = {}
        for job in self._jobs.values():
            if owners.setdefault(job.folder, job) is not job:  # one would be extended and become the other
                raise UserError(
                    f"the rows have changed, so two different runs would share {job.folder}; give another --out"
                )
            job.read()

    def _settled(self, config: Config, auto: Dtype | None) -> Config:
        """The configuration with a dtype in the place of `auto`: the one given, or what it means on this machine."""
        if config.base.dtype != "auto":
            return config
        if auto:
            settled, note = replace(config.base, dtype=auto), f"computing in {auto}, as in the runs that are there"
        else:
            device = choose_device(config.device)
            settled, note = settle_dtype(config.base, device)
            if device == "cpu" and not tasks.find(config.task.name).images and (hint := speed.hint()):
                note = f"{note} ({hint})"
        self.notes += [note] if note not in self.notes else []
        return replace(config, base=settled)

    def _job(self, config: Config, folder: Path | None = None) -> Job:
        """The run of a configuration: the one that is planned already, or a new one."""
        config = replace(config, method=methods.canonical(config.method))
        digest = _digest(configfile.as_dict(config))
        if digest not in self._jobs:
            folder = folder or self._out / "needs" / f"{short(config.method['name'])}-{digest}-{config.seed_name}"
            folder = self._begun.get(digest, folder)
            shown = folder.relative_to(self._out).as_posix()
            self._jobs[digest] = Job(config, methods.build(config.method), folder, shown)
        return self._jobs[digest]

    def _link(self, job: Job) -> None:
        """Find the runs that this one starts from among the rows, or plan them."""
        config = job.config
        for name in job.method.needs:
            need = job.needs[name] = self._job(needed_config(config, name))
            if (round := job.method.needed(name).round) is None:
                need.config = replace(need.config, export=ExportConfig())  # which is what is merged
            else:
                for keeper in (job, need):
                    settings = keeper.config.checkpoint
                    rounds = tuple(sorted({*settings.keep_rounds, round}))
                    keeper.config = replace(keeper.config, checkpoint=replace(settings, keep_rounds=rounds))
            self._link(need)

    def jobs(self) -> Iterator[Job]:
        """Every run once: seed by seed, needed runs first."""
        ordered: dict[int, Job] = {}

        def add(job: Job) -> None:
            for need in job.needs.values():
                add(need)
            ordered.setdefault(id(job), job)

        for job in self.cells.values():
            add(job)
        return iter(ordered.values())


def _folder_names(labels: Iterable[str]) -> dict[str, str]:
    """Labels as names of folders, different ones also where a file system does not tell a from A."""
    names: dict[str, str] = {}
    for label in labels:
        name = stem = re.sub(r"[^\w.+=-]+", "-", label).strip("-.") or "row"
        number = 2
        while name.lower() in (taken.lower() for taken in names.values()):
            name, number = f"{stem}-{number}", number + 1
        names[label] = name
    return names


def _begun_dtype(planned: Sequence[Config], begun: Sequence[Mapping[str, Any]]) -> Dtype | None:
    """The dtype of the begun runs that are of planned ones with `base.dtype: auto`, or are needed by such; None where
    there are none. All runs of a comparison compute alike, also when it is continued on another machine."""
    fixed = {_digest(configfile.as_dict(config)) for config in planned if config.base.dtype != "auto"}
    open_ones = [config for config in planned if config.base.dtype == "auto"]
    for saved in begun:
        dtype = saved["base"]["dtype"]
        for config in open_ones if _digest(saved) not in fixed else ():
            same = configfile.as_dict(replace(config, base=replace(config.base, dtype=dtype)))
            if _digest(same | {"method": {}}) == _digest({**saved, "method": {}}):
                return dtype
    return None


def _digest(config: Mapping[str, Any]) -> str:
    """Of what decides a run's numbers."""
    decisive = {key: value for key, value in config.items() if key not in ("checkpoint", "export", "report", "track")}
    decisive["eval"] = {key: value for key, value in config["eval"].items() if key != "base"}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]
