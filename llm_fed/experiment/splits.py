"""What a run knows of its rows (`tasks.record`): read before its data are divided, and written before it trains."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm_fed import methods
from llm_fed.basics.errors import RunError, UserError
from llm_fed.runs.folder import BAD_ROWS, SPLITS, Run, holds_results
from llm_fed.runs.records import read_object
from llm_fed.settings.config import Config
from llm_fed.tasks.record import TEST, VALIDATION, Record, together

if TYPE_CHECKING:
    from llm_fed.bench.build import Experiment


@dataclass(frozen=True)
class KnownRows:
    """The rows that a run knows."""

    own: Record | None = None  # from its own folder; None: it begins
    all: Record | None = None  # with those of the runs that it starts from
    folder: Path | None = None  # its own; None: it begins


def recall(folder: Path) -> Record | None:
    """The record in a run folder; None where there is none. RunError: it is damaged."""
    return read(folder / SPLITS)


def recall_around(folder: Path) -> Record | None:
    """The record of the run that a folder is or lies in, as all of its adapters (`adapters`) or as one of them do.
    RunError: it is damaged."""
    folder = folder.resolve()
    inside = [location.parent for location in (folder, folder.parent) if location.name == "adapters"]
    return next((record for location in (folder, *inside) if (record := recall(location)) is not None), None)


def read(path: Path) -> Record | None:
    """The record in a file, see `recall`."""
    try:
        return Record.from_json(read_object(path)) if os.path.exists(path) else None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged: {error}. It says which rows were trained on, so without it they may be tested; start "
            "again with --fresh"
        ) from error


def known(
    folder: Path,
    config: Config,
    *,
    begins: bool = False,
    parents: Mapping[str, Path] | None = None,
    given: Record | None = None,
) -> KnownRows:
    """What the run in a folder knows: by itself, by the runs that it merges, and by that of `adapter.start`. RunError:
    a record is damaged.

    Args:
        begins: whether nothing that lies in the folder counts.
        parents: by the name of a parent its folder (default: `folder/needs/<name>`).
        given: what the run knows for which this one is trained.
    """
    own = None if begins else recall(folder)
    origin = config.start
    others = [given, recall_around(Path(origin)) if origin else None]
    for parent in methods.build(config.method).parents:
        inside = folder / "needs" / parent.name
        location = (parents or {}).get(parent.name, inside)
        if location.is_dir() and holds_results(location) and not (begins and location == inside):
            others.append(recall(location))
    every = together([record for record in (own, *others) if record is not None])
    return KnownRows(own, every, None if begins else folder)


def tested(folder: Path) -> str | None:
    """A checksum of the rows on which a finished run was tested; None where it does not know them."""
    record = recall(folder)
    return None if record is None else record.checksum_of(TEST)


def tested_alike(folder: Path, other: Path) -> bool | None:
    """Whether two finished runs were tested on the same rows; None where one of them does not know its own."""
    known = [tested(folder), tested(other)]
    return None if None in known else known[0] == known[1]


def notes(built: Experiment, known: KnownRows, *, trains: bool = True) -> list[str]:
    """What a user should know of the data of a run; nothing where they are as they were. `trains`: whether the run goes
    on, and is not only scored."""
    record, config = built.record, built.config
    if record is None or known.folder is None or known.own is None or not (changed := record.since(known.own)):
        return []
    sentences = [
        f"the data have changed: {changed}. Rows that the run knows stay in their splits, so "
        "that none is tested that was trained on; new ones are divided by their hash"
    ]
    if trains and config.task.partition.kind != "natural":
        sentences.append(f"task.partition.kind={config.task.partition.kind} deals all rows to the clients anew")
    if not known.own.splits_of(record.digests).any():
        sentences.append(
            "none of the rows is one that the run knows, so some of those scored may say in other words what was "
            "trained on"
        )
    if trains and _scored(record, config) != _scored(known.own, config):
        sentences.append(
            f"the {config.eval.during} examples are others now, so the search for the best round starts again"
        )
    return sentences


def check_noise(run: Run, built: Experiment, known: KnownRows) -> None:
    """Refuse to go on with what would be hidden by noise that was drawn already: the difference of two such answers has
    none. UserError: the rows, or the learning rate of a round that may have been trained, are others now."""
    why = ""
    if built.record and known.folder:
        changed = built.record.since(known.own) if known.own else f"{SPLITS} is gone"
        why = f"the data have changed ({changed})" if changed else ""
    before, next_round = run.before, run.reached + 1
    if before and next_round <= before.rounds and before.lr(next_round) != run.config.lr(next_round):
        why = f"rounds={run.config.rounds} changes the learning rate of round {next_round}, as local.lr_end is another"
    if why:
        raise UserError(
            f"{run.folder} cannot go on: {why}, but a run with privacy draws the same noise again, and subtracting two "
            "answers with the same noise shows what it hides. Put back what has changed, or start again with --fresh"
        )


def remember(run: Run, record: Record | None, known: KnownRows) -> None:
    """Write down with the run in which splits its rows are, before it trains on them. RunError: the disk is full."""
    if record is None:
        return
    if known.own is not None:
        record = record.after(known.own, run.reached)
    run.remember(SPLITS, record.as_json())
    run.changes = [change.words for change in record.changes]
    run.scored_rows = _scored(record, run.config)


def log_reading(run: Run, built: Experiment) -> None:
    """Lines of metrics.jsonl for what became of the user's files, and a file with every row that was left out."""
    reading = built.reading
    for event in reading.events() if reading else ():
        run.log({"kind": "event", "round": 0, "client": built.server.id, **event})
    if reading and reading.skipped:
        run.write_lines(BAD_ROWS, reading.skipped_lines())


def _scored(record: Record, config: Config) -> str:
    """A checksum of the rows that are scored in training."""
    return record.checksum_of({"validation": VALIDATION, "test": TEST}[config.eval.during])
