"""Tasks: whose examples, of text or of images. `load` reads one by name; TASKS is the table of all.

A task from outside is a `Task` named `package.module:NAME`, or by an entry point (`llm_fed.settings.plugins`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llm_fed.basics.errors import UserError, listed, lookup
from llm_fed.settings import paths, plugins
from llm_fed.settings.config import NUMBER, PartitionConfig, TaskConfig
from llm_fed.settings.objects import named
from llm_fed.tasks import (
    commonsense,
    files,
    flan,
    given,
    glue,
    images,
    labelled,
    languages,
    rolebench,
    splits,
    synthetic,
)
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.partition import KINDS as KINDS
from llm_fed.tasks.partition import kept, partition
from llm_fed.tasks.record import Record
from llm_fed.tasks.splits import ByContent

log = logging.getLogger(__name__)

TEST_SHARE = 0.2  # of each client's examples, where the data has no test split at all
MOST_BYTES = 200  # of a client id: a folder may have 255, with what is added while it is written


@dataclass(frozen=True)
class Task:
    """A row of the table; `load` returns the natural clients, with the splits that the data brings."""

    load: Callable[..., TaskData]  # of the configuration and a seed
    metric: str  # the default one
    clients: str
    source: str
    images: bool = False  # its examples are pictures, not text
    selects: bool = False  # whether `load` leaves out the clients that are not requested, before it decodes pictures
    kind: str = ""  # of base that it is for, where that is neither images nor language
    draws_clients: bool = False  # whether `load` makes other clients with each seed, under the same names
    # of one that is an object: by whose rows they are, a SHA-256
    checksums: Callable[[], dict[str, str]] = dict

    @property
    def base_kind(self) -> str:
        """The kind of base that it is for, where `base.kind` names none."""
        return self.kind or ("images" if self.images else "language")


TASKS = {
    "flan": Task(flan.load, flan.METRIC, "8, one per task", flan.HUB_ID),
    "flan-2000": Task(flan.load, flan.METRIC, "8 others, one per task", flan.HUB_ID),
    "rolebench": Task(rolebench.load, rolebench.METRIC, "95, one per role", rolebench.HUB_ID),
    "rolebench-100": Task(rolebench.load, rolebench.METRIC, "100, five Chinese ones too", rolebench.HUB_ID),
    "commonsense": Task(commonsense.load, commonsense.METRIC, "8, one per data set", "eight data sets"),
    "xquad": Task(languages.load_xquad, languages.XQUAD_METRIC, "12, one per language", languages.XQUAD),
    "xnli": Task(languages.load_xnli, languages.XNLI_METRIC, "15, one per language", languages.XNLI),
    "planted": Task(synthetic.load, synthetic.METRIC, "12, in three planted groups", "synthetic", draws_clients=True),
    "files": Task(files.load, files.METRIC, "as in the data", "your own files, or a Hub data set"),
    "classification": Task(
        labelled.load, labelled.CLASSIFICATION, "as in the data", "your own texts with labels", kind=labelled.KIND
    ),
    "regression": Task(
        labelled.load_numbers, labelled.REGRESSION, "as in the data", "your own texts with numbers", kind=labelled.KIND
    ),
}
for _name, _part in glue.PARTS.items():
    TASKS[_name] = Task(glue.load, _part.metric, "1", glue.HUB_ID, kind=labelled.KIND)
for _name, _source in images.SOURCES.items():
    _hub = _source.hub or "your own npz file or folder of images"
    TASKS[_name] = Task(images.load, images.METRIC, _source.clients, _hub, images=True, selects=True)


def find(name: str, key: str = "task.name") -> Task:
    """The task that a name stands for: of this table, or from outside. UserError where there is none. `key`: the
    setting that holds the name, for messages."""
    if name in TASKS:
        return TASKS[name]
    task = plugins.find(key, name, plugins.TASKS, TASKS)
    if not isinstance(task, Task):
        raise UserError(f"{key}={name!r} is {task!r:.60}; it must be a llm_fed.tasks.Task: TASK = Task(load, ...)")
    return task


def of_object(data: Any) -> dict[str, Task]:
    """By name the tasks of what a Python program gives as its data, see `given`; UserError where that has no rows."""
    pictures, collect = given.has_pictures(data), partial(given.collect, data)
    own = {given.NAMES[pictures]: TASKS["images" if pictures else "files"]}
    own |= {named(name): TASKS[name] for name in labelled.NAMES}
    found, checksums = {}, partial(given.checksums, data)
    for name, task in own.items():
        load = partial(given.pictures, data) if task.images else partial(task.load, collect=collect)
        found[name] = dataclasses.replace(task, load=load, selects=False, source="an object", checksums=checksums)
    return found


def load(
    config: TaskConfig, seed: int, held_out: int | None = None, known: Record | None = None, *, absent: bool = False
) -> TaskData:
    """The task's clients after `config.groups`, partition and `config.clients`, and the server's data if it has any.

    Where no client brings a test split, a seeded TEST_SHARE of the training examples of each client with two or more
    becomes one, with a warning; a client without any example is left out. With `config.server.test` the test split is
    the server's, and clients need training examples. A client without a validation split gives `config.validation` of
    its training examples. Label noise falls on the rest. UserError for an unknown task, wrong or missing data, or where
    no client has an example. `held_out`: the seed of which examples become test and validation splits (default:
    `seed`). `known`: rows that keep the split which they had in a run. `absent`: whether groups may be missing, as on a
    machine whose data went away; they count as without an example.
    """
    held_out = seed if held_out is None else held_out
    if config.groups == ():
        raise UserError("task.groups is empty, so there is no client; name some, or set null for all")
    row = find(config.name)
    if not row.images and (config.noise or config.image_size is not None):
        raise UserError(f"task.noise and task.image_size are for images, but {config.name} is text; leave them out")
    if row.base_kind == "language" and config.labels is not None and row is TASKS.get(config.name):
        raise UserError(
            f"task.labels names classes, but {config.name} has none; leave it out, or set task.name=classification"
        )
    paths.check("task.path", config.path, config.name)
    paths.check("task.server.path", config.server.path, config.server.name)
    data = row.load(config, seed)
    if not isinstance(data, TaskData):
        raise UserError(f"task.name={config.name!r}: its load returns {data!r:.60}, not a TaskData")
    natural = data.clients
    if not row.selects:
        if config.groups is not None:
            here = [name for name in config.groups if name in natural] if absent else ()
            chosen = [lookup("task.groups", name, natural) for name in here or config.groups]
            natural = {client.client: client for client in chosen}
        if config.partition.kind == "natural" and config.clients is not None:
            natural = {name: natural[name] for name in kept(list(natural), config, seed)}
    whole = dataclasses.replace(data, clients=natural)
    rows = Record.of(list(natural.values()))
    from_test = config.server.test or (config.server.name is None and config.server.examples != 0)
    divided = _divided(whole, config, seed, ByContent(held_out, known, from_test), absent)
    divided = dataclasses.replace(divided, record=rows.divided(divided.clients.values(), divided.server))
    if config.noise:
        own = divided.clients.items()
        noisy = {name: images.noisy(client, config.noise, len(data.labels), seed) for name, client in own}
        divided = dataclasses.replace(divided, clients=noisy)
    return divided


def _divided(data: TaskData, config: TaskConfig, seed: int, rule: ByContent, absent: bool) -> TaskData:
    """The clients and the server of natural clients whose rows a rule divides; other arguments as of `load`."""
    requested, natural = config.server, data.clients
    if rule.known is not None:
        natural = rule.given(natural, config.partition.test is not None)
    if rule.server:
        natural = {client.client: client for client in _with_test(list(natural.values()), rule)}
    if rule.server or requested.name is not None:
        natural, data = _with_server(natural, data, config, seed, rule)
    others = [data.server] if data.server else []
    if config.partition != PartitionConfig():
        natural = partition(natural, config.partition, seed, not requested.test, rule, others)
    clients = list(natural.values())
    if config.partition.kind != "natural":
        clients = kept(clients, config, seed)
    if not rule.server:
        clients = _with_test(clients, rule)
    everybody = tuple(client.client for client in clients)
    if absent and config.partition.kind == "natural":
        everybody = config.groups or everybody
    clients = _with_examples(clients, data, not requested.test, absent)
    _check_names(clients)  # those of data that a partition divides name no folder
    without = [client for client in clients if not client.validation]
    beside = [*others, *(client for client in clients if client.validation)]
    own = {client.client: client for client in clients}
    own |= {client.client: client for client in rule.hold_out(without, "validation", config.validation, beside)}
    return dataclasses.replace(data, clients=own, everybody=everybody)


def labels_of(config: TaskConfig) -> tuple[str, ...] | None:
    """The labels of a task, as far as they are known without its data."""
    if config.name in images.SOURCES:
        known = config.labels or images.SOURCES[config.name].classes
        return known and known[: images.SOURCES[config.name].first_classes]
    if config.name in glue.PARTS:
        return glue.PARTS[config.name].labels
    return (NUMBER,) if config.name in ("regression", named("regression")) else config.labels


def natural(config: TaskConfig) -> bool:
    """Whether the clients are the same with each seed, as they come with the data or are dealt out without one, so that
    a seed divides their examples and does not draw the clients."""
    return config.partition.kind in ("natural", "cluster") and not find(config.name).draws_clients


def describe() -> list[dict[str, str]]:
    """What `llm-fed tasks` lists of every task: name, default metric and clients, source; or what is wrong with it."""

    def described(name: str) -> dict[str, str]:
        task = find(name)
        return {"name": name, "metric": task.metric, "clients": task.clients, "source": task.source}

    return [described(name) for name in TASKS] + list(plugins.describe(plugins.TASKS, TASKS, described))


def _with_server(
    natural: dict[str, ClientData], data: TaskData, config: TaskConfig, seed: int, rule: ByContent
) -> tuple[dict[str, ClientData], TaskData]:
    """The natural clients without what the server takes of them, and the task with the server's data."""
    requested = config.server
    natural, own = splits.in_domain(natural, requested, seed, rule)
    if requested.name is None:
        return natural, dataclasses.replace(data, server=own)
    row = find(requested.name, "task.server.name")
    if row.base_kind != find(config.name).base_kind:
        raise UserError(
            f"task.server.name={requested.name}: text, images and labelled texts do not mix; "
            f"name a task like {config.name}"
        )
    other = TaskConfig(requested.name, requested.path, image_size=config.image_size)
    others = images.load(other, seed, only=requested.examples) if row.selects else row.load(other, seed)
    own = splits.out_of_domain(own, others.clients, requested.examples, seed, rule)
    return natural, dataclasses.replace(data, server=own, server_labels=others.labels)


def _with_test(clients: list[ClientData], rule: ByContent) -> list[ClientData]:
    """The clients, with a test split held out of each where none has one."""
    if any(client.test for client in clients):
        return clients
    log.warning("no test split: about %.0f %% of each client's training examples become one", 100 * TEST_SHARE)
    return rule.hold_out(clients, "test", TEST_SHARE)


def _with_examples(clients: list[ClientData], data: TaskData, tested: bool, absent: bool) -> list[ClientData]:
    having = [client for client in clients if client.train or (tested and client.test)]
    if not having or not (absent or any(client.train for client in having)):
        empty = f" (none in {listed(data.reading.empty)})" if data.reading and data.reading.empty else ""
        named = listed([client.client for client in clients])
        raise UserError(f"none of the clients {named} has a training example{empty}; add some")
    return having


def _check_names(clients: list[ClientData]) -> None:
    seen: dict[str, str] = {}
    for name in (client.client for client in clients):
        if name in (".", "..") or not name.isprintable() or set(name) & set("/\\"):
            raise UserError(f"client id {name!r} cannot name a folder of the run; use ids without slashes")
        if len(name.encode()) > MOST_BYTES:
            raise UserError(
                f"client id {name[:40]!r}... has {len(name.encode())} bytes, too many for the name of a folder; use "
                f"ids of at most {MOST_BYTES}"
            )
        if name.casefold() in seen:
            raise UserError(f"client ids {seen[name.casefold()]!r} and {name!r} differ in case only")
        seen[name.casefold()] = name
