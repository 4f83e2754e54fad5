"""Tiny runs of several methods and of what else decides how a round goes, for `llm-fed audit`."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import image_runs
import small_run
import tiny_images
import torch
from battery import SETTINGS
from rich.console import Console

from llm_fed.audit.audit import audit
from llm_fed.audit.findings import Audit
from llm_fed.basics import checksum
from llm_fed.bench.bases import Bases
from llm_fed.experiment import run
from llm_fed.runs import digests
from llm_fed.runs.folder import take_down
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.settings.config import Config

OF_IMAGES = ", image models"
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {"method": {"name": name, **SETTINGS.get(name, {})}} for name in ("fedit", "local", "fedmerge", "fedsa")},
    "scaffold": {"method": {"name": "scaffold"}, "local": {"optimizer": "sgd", "momentum": 0.0}},
    "feddle, late answers": {
        "method": {"name": "feddle"}, "delay": {"sigma": 1.0}, "task": {"server": {"examples": 2}},
        "eval": {"ability": True},
    },
    "half of the clients": {"participation": 0.5, "rounds": 4},
    "flora, unequal ranks": {"method": {"name": "flora"}, "adapter": {"rank": [1, 2, 3]}, "participation": 0.7},
    "scored every second round": {"eval": {"every": 2}, "checkpoint": {"every": 2, "keep": 1}},
    "resumed": {},
}  # fmt: skip
_BASES = Bases()


def base_of(config: Config) -> Any:
    """The base of a run, loaded once."""
    return _BASES.of(config)


def configured(family: str, data: Path) -> Config:
    """The configuration of a family; `data` is a folder for what it reads, which is made if need be."""
    if family.endswith(OF_IMAGES):
        if not (data / "pictures.npz").exists():
            data.mkdir(parents=True, exist_ok=True)
            tiny_images.npz(data / "pictures.npz")
            tiny_images.npz(data / "other.npz", seed=7)
        return configfile.load(image_runs.configured(data / "pictures.npz", family.removesuffix(OF_IMAGES)))
    if not (data / "more").exists():
        small_run.make(data / "text")
        small_run.write_data(data / "more", {"train": 6, "validation": 2, "test": 6})
    small = small_run.Small(data / "text" / "base", data / "more")
    return configfile.load(small.tree(**FAMILIES[family]))


def train(family: str, config: Config, folder: Path) -> Path:
    """A run of a family; `resumed` is interrupted in its second round."""
    if family == "resumed":
        with suppress(KeyboardInterrupt):
            run.train(config, folder, reporter=_Stop(Console(quiet=True)), base=_BASES.of(config))
    run.train(config, folder, reporter=_quiet(), base=_BASES.of(config))
    return folder


def audited(folder: Path, config: Config, *, elsewhere: int = 0) -> Audit:
    """The audit of all rounds of a run, and of the runs that it merges.

    Args:
        elsewhere: with so many threads, and other kernels and another packing than the run had; its environment.json
            then names another version of torch, so that the audit knows. 0: as the run was made.
    """
    if elsewhere:
        for path in folder.rglob("environment.json"):
            said = checksum.checked(json.loads(path.read_text()))
            if said["torch"] != "another":
                packing = 3 if said["clients_per_pass"] == 1 else 1
                other = {"torch": "another", "threads": elsewhere, "clients_per_pass": packing}
                path.write_text(json.dumps(checksum.added({**said, **other})))
                take_down(path.parent, {path.name: digests.of_file(path)})
    found, kernels = Audit(), torch.backends.mkldnn
    kernels.set_flags(_enabled=not elsewhere)
    try:
        for each in [folder, *sorted(folder.glob("needs/*"))]:
            of_one = audit(each, every=True, reporter=_quiet(), base=_BASES.of(config))
            found.findings += of_one.findings
            found.checked += of_one.checked
            found.unchecked += of_one.unchecked
            found.drift |= {f"{each.name} {rounds}": share for rounds, share in of_one.drift.items()}
    finally:
        kernels.set_flags(_enabled=True)
    return found


def _quiet() -> Reporter:
    return Reporter(Console(quiet=True))


class _Stop(Reporter):
    def record(self, record: Any) -> None:
        if (record["kind"], record["round"]) == ("round", 2):
            raise KeyboardInterrupt
