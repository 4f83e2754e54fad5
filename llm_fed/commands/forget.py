"""`llm-fed forget`: a finished run becomes what it would be if one of its clients had never been there.

It is trained anew without this client, by what trains every run, in a folder beside its own. That takes the place of
the old one, which is deleted, by two renames. The rows of the others stay in their splits, whatever the client's rows
had to do with these; all else is that of a run which began with the others alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llm_fed import methods, tasks
from llm_fed.basics.errors import UserError, listed, require
from llm_fed.basics.files import remove, sync_folder
from llm_fed.basics.names import same_name
from llm_fed.bench.costs import read_work
from llm_fed.experiment import run, splits
from llm_fed.experiment.simulation import Simulation
from llm_fed.models import ranks
from llm_fed.runs import extend, inputs
from llm_fed.runs.folder import ENDED, WRITTEN
from llm_fed.runs.inputs import Contents, Files
from llm_fed.runs.lock import Lock
from llm_fed.runs.reading import is_finished, read_config
from llm_fed.runs.records import recall
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict
from llm_fed.tasks.common import Example
from llm_fed.tasks.record import Record

_ROW = re.compile(r", (?:line|row|item) \d+$")  # behind the file, in the place of an example


def forget(folder: Path, client: str, agreed: Callable[[str], bool], reporter: Reporter | None = None) -> list[str]:
    """Train a run again without a client, and put that in the run's place. Killed, the same call goes on. Returns what
    cannot be taken back, in lines; none where that was not agreed to. UserError: the run cannot be trained again, or
    has no such client; what to do. RunError: another process writes to the folder; or see `experiment.run.train`.
    `agreed`: is told what it costs before anything is written; whether to go on."""
    folder = folder.resolve()
    beside = folder.with_name(f".{folder.name}.forget")
    again = beside / folder.name  # by the same name, which its report has
    old = beside / f".{folder.name}.replaced"  # in there, so that what a kill leaves of it goes with the rest
    if not folder.exists() and is_finished(again):  # killed between the two renames
        os.replace(again, folder)
    config, record = read_config(folder), splits.recall(folder)
    with ExitStack() as stack:
        lock = Lock(folder)
        lock.acquire(print)
        stack.callback(lock.release)
        groups = read_config(again).task.groups if (again / "config.yaml").exists() else None
        begun = groups is not None and record is not None and {*groups} < {*record.clients}
        if beside.exists() and not begun and record and same_name(client, record.clients) is None:
            remove(beside)  # what a kill has left of the old run
            return _lasting(config, client)
        record = _checked(folder, config, record, client)
        client = require("--client", client, record.clients)
        _check_data(folder, config, record, client)
        others = _without(config, client, record.clients)
        if not agreed(f"{folder} is trained again from the start without {client}: {_cost(folder, others)}"):
            return []
        if groups != others.task.groups:
            remove(again / "config.yaml")  # first, so that a kill leaves nothing that seems to have begun
            remove(beside)  # nothing, or begun for another client
        _train(others, again, record, reporter or Reporter())
        remove(old)
        os.replace(folder, old)
        os.replace(again, folder)
        sync_folder(folder.parent)
        remove(beside)
    return _lasting(config, client)


def _checked(folder: Path, config: Config, record: Record | None, client: str) -> Record:
    """What the run knows of its rows. UserError: it cannot be trained again as it was, or should not be; or has no such
    client."""
    if (folder / "network.json").exists():
        raise UserError(
            f"{folder} is a run over a network, whose rows are on other machines, so nobody can train it again here; "
            "leave the client out of network.clients, and start again with --fresh"
        )
    if record is None:
        raise UserError(f"{folder} has no {splits.SPLITS}, which says in which split the rows of the others must stay")
    if not is_finished(folder):
        raise UserError(
            f"{folder} has not come to its end; the command that began it goes on, and its --finish ends it"
        )
    for why, there in _hindrances(folder, config, client).items():
        if there:
            raise UserError(f"{folder} cannot forget {client}: {why}")
    require("--client", client, record.clients)
    if len(record.clients) == 1:
        raise UserError(f"{client} is the only client of {folder}, so nothing would be left; delete the folder")
    inputs.check_base(folder, as_dict(config)["base"], inputs.read(folder), Contents())
    return record


def _hindrances(folder: Path, config: Config, client: str) -> dict[str, bool]:
    """Why a run should not, or cannot, be trained again without a client, and whether that is so."""
    ended, origin = recall(folder / ENDED), config.start
    source = splits.recall_around(Path(origin)) if origin else None
    strange = [name for name in sorted(os.listdir(folder)) if name not in WRITTEN and not name.startswith(".")]
    return {
        f"task.partition.kind={config.task.partition.kind} has dealt all rows to its clients, and would deal them anew "
        "without that one's; take these out of the data, and start again with --fresh":
            config.task.partition.kind != "natural",
        "privacy.clip has hidden its clients, and epsilon says how well. Another answer from the rows of the others "
        "would spend their epsilon twice, and the difference of the two runs is what the client had added; train a run "
        "of the others (task.groups) beside it only if both epsilons together will do": config.privacy.clip is not None,
        f"it was ended by hand after round {ended and ended['round']} of {config.rounds}, which nobody can do again; "
        "--continue trains the rest": ended is not None and not extend.by_rule(ended),
        f"it starts from {origin}, which has learned from that client, too; forget it there first":
            source is not None and same_name(client, source.clients) is not None,
        f"{listed(strange)} in it is not of the run, and may hold what has learned from the client; move it away":
            bool(strange),
    }  # fmt: skip


def _check_data(folder: Path, config: Config, record: Record, client: str) -> None:
    """Refuse a run whose data have changed, but for the client's rows, which may have been deleted already. UserError:
    what has changed."""
    task = replace(config.task, groups=record.clients, clients=None, sample_clients=False)
    now = tasks.load(task, config.federation_seed, config.evaluation_seed, record, absent=True).record
    assert now is not None  # `tasks.load` makes one
    changed = now.since(record)
    if client not in now.clients:  # of a file that several share, its rows are gone
        same = {*now.clients} == {*record.clients} - {client} and np.isin(now.digests, record.digests).all()
        changed = "" if same else changed
    if changed:
        raise UserError(
            f"{folder} cannot be trained again as it was, since the data have changed: {changed}; put them back"
        )


def _without(config: Config, client: str, everybody: Sequence[str]) -> Config:
    """The configuration of a run of the others alone, who keep their ranks and models, which may follow an index."""
    listed = () if isinstance(config.network.clients, int) else config.network.clients
    indices = {name: index for index, name in enumerate(everybody)}
    indices |= {name.partition("@")[0]: index for index, name in enumerate(listed)}
    others = tuple(name for name in everybody if name != client)
    base, adapter, exported = config.base, config.adapter, config.export.clients
    if base.clients:
        base = replace(base, clients=tuple(base.clients[indices[name] % len(base.clients)] for name in others))
    if adapter and config.ranks_differ:
        adapter = replace(adapter, rank=tuple(ranks.of(adapter.rank, name, indices[name]) for name in others))
    if not isinstance(exported, str):
        exported = tuple(name for name in exported if same_name(name, [client]) is None) or "none"
    return replace(
        config, base=base, adapter=adapter, export=replace(config.export, clients=exported),
        task=replace(config.task, groups=others, clients=None, sample_clients=False),
        network=replace(config.network, clients=len(others) if listed else config.network.clients),
    )  # fmt: skip


def _cost(folder: Path, others: Config) -> str:
    """In rounds, and in steps as the run has needed them."""
    number = len(others.task.groups or ())
    clients = f"{number} {'client' if number == 1 else 'clients'}"
    parents = {parent.name: folder / "needs" / parent.name for parent in methods.build(others.method).parents}
    steps = sum(read_work(run).steps for run in [folder, *parents.values()] if is_finished(run))
    first = f"; the runs that it merges ({', '.join(parents)}) are trained first" if parents else ""
    return f"{others.rounds:,} rounds with {clients}, about {round(steps * number):,} steps of theirs in all{first}"


def _hidden(others: Config, record: Record) -> frozenset[str]:
    """The files in which the others have no row, and the folders in which they have no file."""
    whole = replace(others.task, groups=record.clients)
    everybody, left = (
        _files(tasks.load(task, others.federation_seed, others.evaluation_seed, record, absent=True), task.path or "")
        for task in (whole, others.task)
    )
    gone = everybody - left
    return frozenset(gone | ({os.path.dirname(file) for file in gone} - {os.path.dirname(file) for file in left}))


def _files(data: tasks.TaskData, path: str) -> set[str]:
    """In which files the rows of a task are, below its folder; of pictures the names of the clients."""
    found = set()
    for party in [*data.clients.values(), *([data.server] if data.server else [])]:
        for row in (*party.train, *party.validation, *party.test):
            file = _ROW.sub("", row.where) if isinstance(row, Example) else ""
            below = os.path.basename(file) if file == path else file.removeprefix(os.path.join(path, ""))
            found.add(below or party.client)
    return found


def _train(others: Config, again: Path, record: Record, reporter: Reporter) -> None:
    """Begin the run of the others, or continue it; of one that is refused nothing stays."""
    contents = _Others(_hidden(others, record))
    try:
        run.train(others, again, reporter=reporter, contents=contents, mode=Simulation(known=record))
    finally:
        if not (again / "config.yaml").exists():
            remove(again.parent)


class _Others(Contents):
    """The files that a configuration names, without those that are hidden, or lie in a folder that is."""

    def __init__(self, hidden: frozenset[str]):
        super().__init__()
        self._hidden = hidden

    def named(self, key: str, name: Any, revision: str | None = None) -> Files | None:
        files = super().named(key, name, revision)
        if key != "task.path" or files is None:
            return files
        return {path: own for path, own in files.items() if not self._hidden & {path, os.path.dirname(path)}}


def _lasting(config: Config, client: str) -> list[str]:
    """What has left the folder, of which nobody keeps a list."""
    rows = f", in {config.task.path}," if config.task.path else ""
    return [
        f"the rows of {client} themselves{rows} which this command does not touch",
        "adapters of this run, of any client, as all have learned from it: repositories of llm-fed push, folders of "
        "export, merge and join, and servers that have loaded one",
        "runs that began from this one (--from) or merge it, and tables of comparisons that name it",
        *([f"what {' and '.join(config.track.with_)} were told"] if config.track.with_ else []),
        "copies and backups of the folder, and of its report",
    ]
