"""Where a run starts from another's adapters, as `adapter.start` says, and not from fresh draws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.export import models, peft_folders
from llm_fed.export.origins import read_origin
from llm_fed.kinds import Kind
from llm_fed.merge import mean
from llm_fed.method import Method
from llm_fed.method.site import Site
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.settings.config import Config
from llm_fed.state import State
from llm_fed.state.wire import pack

_RECORD = "start.json"


def give(config: Config, method: Method, sites: Iterable[Site], base: Kind) -> str:
    """Let every site start from the mean of the adapters in `adapter.start`, and where clients share nothing
    (`Method.own_start`), each from its own adapter there, if it has one.

    Under any other method the same start for all is what makes it right: updates are differences to a common model, and
    what never travels, such as the A of FFA-LoRA, must be the same everywhere. A and B are averaged one by one, as
    FedIT does, with the numbers of training examples as weights where the run's metrics.jsonl has them for all. Returns
    what was found, in words. UserError: there are no adapters, they do not fit, or privacy would be promised that the
    start does not keep.
    """
    start = config.start
    assert start is not None  # callers have looked
    if config.privacy.clip is not None:
        raise UserError(
            f"adapter.start={start} was trained without the noise of this run, so epsilon would not cover what it "
            "learned; set privacy.clip or adapter.start to null"
        )
    sites = list(sites)
    adapters = _read(Path(start), sites[0].structure, base, config.method["name"])
    sizes = examples_of(Path(start))
    known = adapters.keys() <= sizes.keys()
    first, *others = states = list(adapters.values())
    alike = all(other.equal(first) for other in others)  # their mean would differ from them in the last bits
    common = first if alike else mean(states, [sizes[name] for name in adapters] if known else None)
    drawn = sites[0].initial()
    own = {name: drawn.like(state.row.to(drawn.row)) for name, state in adapters.items()} if method.own_start else {}
    common = drawn.like(common.row.to(drawn.row))
    for site in sites:
        site.start = own.get(site.id, common)
    said = f"starting from the adapter in {start}"
    if others:
        whose = "each client's own, for others the mean" if method.own_start else "all equal" if alike else "the mean"
        weighed = ", weighed by numbers of examples" if known and not alike else ""
        said = f"starting from the {len(adapters)} adapters in {start}: {whose}{weighed}"
    origin = read_origin(_folders(Path(start))[0])
    before, now = (each and each.quantization or "full precision" for each in (origin, base.source))
    differs = origin and origin.dtype and before != now  # an adapter from elsewhere need not say
    return f"{said}; trained on the base in {before}, and here it is in {now}" if differs else said


def check(run: Run, sites: Sequence[Site], start: str) -> None:
    """Refuse to continue a run whose start is no longer what it was. UserError: the adapters there have changed."""
    if (before := run.recall(_RECORD)) is not None and before["sha256"] != _digest(sites):
        raise UserError(
            f"the adapters in {start}, from which the run {run.folder} started, have changed since; put the old ones "
            "back to continue it, or start again with --fresh or another --out"
        )


def remember(run: Run, sites: Sequence[Site], start: str) -> None:
    """Write down with the run which adapters it starts from."""
    run.remember(_RECORD, {"start": start, "sha256": _digest(sites)})


def _digest(sites: Sequence[Site]) -> str:
    """Of what each site starts from."""
    different: dict[int, State] = {}
    for site in sites:
        different.setdefault(id(site.initial()), site.initial())
    order = list(different)
    who = {site.id: order.index(id(site.initial())) for site in sites}
    return hashlib.sha256(pack([who, list(different.values())])).hexdigest()


def _read(start: Path, structure: Any, base: Kind, method: str) -> dict[str, State]:
    """The adapters in a run folder, in a folder of adapters, or in the folder of one, by the name of their folder."""
    structure = replace(structure, delta=False)  # an adapter of the rank that clients train
    adapters = {}
    for folder in _folders(start):
        experts = (folder / peft_folders.GATE).is_file()
        if experts == structure.plain:
            has, wants = ("several experts", "one adapter") if experts else ("one adapter", "several experts")
            raise UserError(
                f"adapter.start: {folder} holds {has}, but {method} gives each client {wants}; start from a run of a "
                "method that gives clients the same"
            )
        try:
            adapters[folder.name] = models.read(folder, structure, base)
        except UserError as error:
            raise UserError(
                f"adapter.start: {error}. adapter.rank, adapter.alpha, adapter.rslora and adapter.target_modules must "
                "be those with which it was trained"
            ) from error
    return adapters


def _folders(start: Path) -> list[Path]:
    if _holds_adapter(start):
        return [start]
    is_run = (start / "config.yaml").is_file()
    if is_run and not (start / "summary.json").is_file():
        raise UserError(
            f"adapter.start={start} is a run that is not finished, so it has no adapters yet; finish it first, by "
            "the command that started it"
        )
    if not (folders := sorted(filter(_holds_adapter, (start / "adapters" if is_run else start).glob("[!.]*")))):
        raise UserError(
            f"adapter.start={start} holds no adapter; give a finished run folder, a folder with one PEFT folder per "
            "client, or one PEFT folder"
        )
    return folders


def _holds_adapter(folder: Path) -> bool:
    return (folder / peft_folders.CONFIG).is_file() or (folder / peft_folders.GATE).is_file()


def examples_of(folder: Path) -> Mapping[str, int]:
    """By client, the number of training examples that a run's metrics.jsonl tells; of other folders nothing."""
    lines = read_records(folder / "metrics.jsonl") if folder.is_dir() else []
    return {line["client"]: line["examples"] for line in lines if line["kind"] == "client"}
