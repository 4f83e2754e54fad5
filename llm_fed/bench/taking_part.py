"""Who takes part in a run: which clients train, which are scored, and which are left out, with a line for each kind.

A client needs no test example to train. One without a training example is scored where a method has one model for all,
and left out where it makes each client's model from the client's own training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from llm_fed.basics.errors import UserError, listed
from llm_fed.method import Method
from llm_fed.method.client import Client
from llm_fed.method.site import Site

if TYPE_CHECKING:
    from llm_fed.bench.build import Experiment

LEFT_OUT = "these clients have no training example and are left out"
ONLY_TESTED = "these clients have no training example and are only scored"
UNSCORED = "these clients have no test example, so they train and are not scored"
ONE_EXAMPLE = "these clients train on a single example"


def choose(clients: Mapping[str, Client], method: Method) -> dict[str, Client]:
    """The clients that a run of this method trains or scores. UserError: none of them has a training example."""
    if not any(site.train for site in clients.values()):
        raise UserError(f"none of the clients {listed([*clients])} has a training example; add some")
    return {id: site for id, site in clients.items() if site.train or (method.one_model and site.data.queries["test"])}


def check_lengths(sites: Iterable[Site]) -> None:
    """Refuse a site of which no example of a split fits into the task's largest length. UserError: the first such site,
    and what to do."""
    for site in sites:
        for message in site.data.none_fits:
            raise UserError(message)


def notes(built: Experiment, *, everybody: bool = True) -> list[str]:
    """What a user should know of clients that lack training, test or validation examples; nothing where none does.
    `everybody`: whether these are all clients, and not those of one machine of a network."""
    number, method = len(built.clients) + len(built.left_out), built.config.method["name"]
    lines = only_one([*built.clients, *built.left_out], [*built.trainers]) if everybody else []
    unscored = built.unscored
    tested = f"{ONLY_TESTED}, with the model that {method} makes for all"
    kinds: dict[str, Sequence[str]] = {LEFT_OUT: built.left_out, tested: built.only_tested, UNSCORED: unscored}
    if unscored and len(unscored) == len(built.clients):
        del kinds[UNSCORED]
        lines.append("no client has a test example: all train, none is scored")
    kinds[ONE_EXAMPLE] = [id for id, site in built.trainers.items() if len(site.train) == 1 and id not in unscored]
    if instead := built.method.without_held_out:
        lacking = [id for id, site in built.trainers.items() if not site.data.held_out]
        kinds[f"these clients have no validation example, so {instead}"] = lacking
    return lines + [line(what, names, number) for what, names in kinds.items() if names]


def only_one(names: Sequence[str], trained: Sequence[str]) -> list[str]:
    """That a federation has one client, or one that trains, if it has."""
    if len(names) == 1:
        told = f"there is only one client, {names[0]}, so nothing is federated"
        return [f"{told}; if a column names the clients, say which: --client or task.columns.client"]
    if len(trained) == 1:
        return [f"only one client of {len(names)}, {trained[0]}, has training examples, so nothing is federated"]
    return []


def line(what: str, names: Sequence[str], number: int) -> str:
    """One line on these of so many clients."""
    return f"{what} ({len(names)} of {number}): {listed(names)}"
