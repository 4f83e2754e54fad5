"""The runs of a comparison: every row of a configuration file with every seed, equal runs once, checked before any
begins."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed import kinds, methods
from llm_fed.basics.errors import UserError
from llm_fed.bench.parents import config_of
from llm_fed.commands.section import Rows, in_row
from llm_fed.experiment.job import Job
from llm_fed.models.loading import settle_dtype
from llm_fed.runs import inputs
from llm_fed.runs.folder import holds_results
from llm_fed.runs.inputs import KEYS, Contents, translated
from llm_fed.runs.reading import saved_config
from llm_fed.runtime.launch import choose_device
from llm_fed.settings import configfile, paths
from llm_fed.settings.config import Config, ExportConfig
from llm_fed.settings.plugins import short


class ComparisonPlan:
    """Every run of a comparison, equal ones once, resolved and checked against what lies on disk."""

    def __init__(self, given: Rows, out: Path):
        self.rows, self.seeds, self.own, self._out = given.rows, given.seeds, given.own, out
        # By digest: what an earlier command began there (under another label, perhaps), and what is planned.
        configs = sorted([*out.glob("*/config.yaml"), *out.glob("needs/*/config.yaml")])
        begun = {config.parent: saved_config(config.parent) for config in configs if holds_results(config.parent)}
        self._contents = Contents()
        self._jobs: dict[str, Job] = {}
        self.cells: dict[tuple[str, int], Job] = {}  # by label and seed
        names = _folder_names(self.rows)
        folders = {(label, seed): out / f"{names[label]}-seed{seed}" for label, seed in given.cells}
        planned = {}
        for (label, seed), config in given.cells.items():
            with in_row(label):
                planned[label, seed] = replace(paths.absolute(config), method=methods.canonical(config.method))
        flat = [configfile.flat(configfile.as_dict(config)) for config in planned.values()]
        for location, saved in begun.items():
            before = configfile.flat(saved)
            if not any(all(each.get(key) == before.get(key) for key in KEYS) for each in flat):
                recorded = inputs.read(location)
                any(translated(saved, recorded, config, self._contents) for config in planned.values())
        self._begun = {_digest(saved): location for location, saved in begun.items()}
        # What `base.dtype: auto` has meant: all runs compute alike, also when another machine continues them.
        own = {folders[cell] for cell, config in planned.items() if config.base.dtype != "auto"}
        auto = next((saved["base"]["dtype"] for folder, saved in begun.items() if folder not in own), None)
        self.notes: list[str] = []  # what a user should know before the first run
        self.file = self._settled(paths.absolute(given.file), auto)
        for (label, seed), config in planned.items():
            with in_row(label):
                self.cells[label, seed] = self._job(self._settled(config, auto), folders[label, seed])
        for job in list(self._jobs.values()):
            self._link(job)
        owners: dict[Path, Job] = {}
        for job in self._jobs.values():
            if owners.setdefault(job.folder, job) is not job:  # one would be extended and become the other
                raise UserError(
                    f"the rows have changed, so two different runs would share {job.folder}; give another --out"
                )
            job.read()

    def _settled(self, config: Config, auto: str | None) -> Config:
        """The configuration without `auto`: with what it has meant in the runs that are there, or what it means now."""
        if config.base.dtype != "auto":
            return config
        if auto:
            settled = replace(config.base, dtype=auto)  # type: ignore[arg-type]
            note = f"computing in {auto}, as in the runs that are there"
        else:
            device = choose_device(config.device)
            settled, note = settle_dtype(config.base, device)
            if hint := kinds.chosen(config).hint(config.base, device):
                note = f"{note} ({hint})"
        self.notes += [note] if note not in self.notes else []
        return replace(config, base=settled)

    def _job(self, config: Config, folder: Path | None = None) -> Job:
        """The run of a configuration: the one that is planned already, or a new one."""
        config = replace(config, method=methods.canonical(config.method))
        if (digest := _digest(configfile.as_dict(config))) not in self._jobs:
            folder = folder or self._out / "needs" / f"{short(config.method['name'])}-{digest}-{config.seed_name}"
            folder = self._begun.get(digest, folder)
            shown = folder.relative_to(self._out).as_posix()
            self._jobs[digest] = Job(config, methods.build(config.method), folder, shown, self._contents)
        return self._jobs[digest]

    def _link(self, job: Job) -> None:
        """Find the runs that this one starts from among the rows, or plan them."""
        config = job.config
        for parent in job.method.parents:
            first = job.parents[parent.name] = self._job(config_of(parent.name, config))
            if parent.round is None:
                first.config = replace(first.config, export=ExportConfig())  # which is what is merged
            else:
                for keeper in (job, first):
                    settings = keeper.config.checkpoint
                    rounds = tuple(sorted({*settings.keep_rounds, parent.round}))
                    keeper.config = replace(keeper.config, checkpoint=replace(settings, keep_rounds=rounds))
            self._link(first)

    def jobs(self) -> Iterator[Job]:
        """Every run once: seed by seed, parents first."""
        ordered: dict[Job, None] = {}

        def add(job: Job) -> None:
            for parent in job.parents.values():
                add(parent)
            ordered.setdefault(job)

        for job in self.cells.values():
            add(job)
        return iter(ordered)


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


_INDECISIVE = ("checkpoint", "engine", "export", "report", "track")  # sections of a configuration


def _digest(config: Mapping[str, Any]) -> str:
    """Of what decides a run's numbers."""
    decisive = {key: value for key, value in config.items() if key not in _INDECISIVE}
    decisive["eval"] = {key: value for key, value in config["eval"].items() if key != "base"}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]
