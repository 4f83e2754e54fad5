"""Makes the sites of a run, the clients and the server, with their data as training and evaluation see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch.utils.data import ConcatDataset

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import Secret
from llm_fed.bench import taking_part
from llm_fed.federation import privacy
from llm_fed.federation.schedule import Delayed, Poisson, Schedule
from llm_fed.kinds import Kind
from llm_fed.method import Method
from llm_fed.method.client import Client
from llm_fed.method.server import Server
from llm_fed.method.site import Data
from llm_fed.models import ranks
from llm_fed.models.structure import Structure
from llm_fed.runs.tracking import Reporter
from llm_fed.scoring.evaluation import check_options, check_pairs, notes_on_length, notes_on_scores
from llm_fed.scoring.scores import find
from llm_fed.settings.config import Config
from llm_fed.state import State
from llm_fed.tasks.common import ClientData, TaskData


def schedule_of(config: Config, clients: tuple[str, ...], secret: Secret | None) -> Schedule:
    """Who is asked in which round, and how late the answers are."""
    if secret and config.privacy.central:
        return Poisson(clients, config.participation, secret)
    late = config.delay
    return Delayed(clients, config.participation, config.training_seed, sigma=late.sigma, drop_out=late.drop_out)


def build(
    config: Config,
    task: TaskData,
    base: Kind,
    method: Method,
    metric: str,
    reporter: Reporter,
    secret: Secret | None,
    *,
    every: bool,
) -> tuple[dict[str, Client], Server, Schedule]:
    """The clients and the server with their data, and who is asked when. UserError: data that a metric cannot score, or
    none of which anything fits. `secret`: of what hides examples, and who takes part; None without `privacy.clip`.
    `every`: whether clients are kept that neither train nor are scored."""
    structure = base.structure(config.adapter)
    read = find(metric, labelled=bool(task.labels)).scores
    encoding = base.encoding(config, task, read, reporter.note)

    def data_of(id: str, given: ClientData | None, labels: int, foreign: bool = False) -> Data:
        data = Data(metric=metric, num_labels=labels, foreign=foreign)
        if given is None:
            return data
        data = encoding.data(id, given, data)
        if read == "options":
            check_options(id, data)
        if read == "preferences":
            check_pairs(id, data)
        return data

    own_structure = cache(partial(base.structure, config.adapter))
    together = method.together(config.rounds)
    alone = config.participation * (config.rounds - together)
    private = privacy.of_examples(config.privacy, secret) if secret else None
    shared = config.local, config.training_seed
    at_server: Structure = method.wrap(structure, None)
    drawn: dict[Structure, State] = {}
    clients: dict[str, Client] = {}
    listed = () if isinstance(config.network.clients, int) else config.network.clients
    indices = {name: index for index, name in enumerate(task.everybody or task.clients)}
    indices |= {name.partition("@")[0]: index for index, name in enumerate(listed)}  # of which a machine has some alone
    for id, given in task.clients.items():
        own = config.base.clients[indices[id] % len(config.base.clients)] if config.base.clients else ""
        rank = ranks.of(config.adapter.rank, id, indices[id]) if config.adapter and config.ranks_differ else None
        plain = own_structure(own, rank)
        data = data_of(id, given, len(base.labels))
        client = Client(
            id, plain, *shared, partial(base.draw, plain), data, rounds=together, private=private,
            objective=config.objective, alone=alone,
        )  # fmt: skip
        wrapped = method.wrap(plain, client)
        clients[id] = client = replace(client, structure=wrapped, draw=partial(base.draw, wrapped))
        if wrapped.fused:
            if wrapped not in drawn:
                drawn[wrapped] = client.initial()
            client.expect(drawn[wrapped])
    labels, foreign = len(task.server_labels or base.labels), config.task.server.name is not None
    data = data_of("server", task.server, labels, foreign)
    server = Server(
        "server", at_server, *shared, partial(base.draw, at_server), data, rounds=together, step=config.server,
        objective=config.objective,
        structures={id: client.structure for id, client in clients.items()} if config.ranks_differ else {},
    )  # fmt: skip
    if not any(site.train for site in clients.values()):
        taking_part.check_lengths(clients.values())
    if note := encoding.note():
        reporter.note(note)
    sites = [*clients.values(), server]
    if config.eval.ability and clients and not any(site.data.ability for site in sites):
        raise UserError(
            "eval.ability=true is measured of language models that learn answers or texts, and neither of labels and "
            "pictures nor with preferences; leave it out"
        )
    for note in [*notes_on_scores(sites, metric), *notes_on_length(sites, config.eval.max_new_tokens).values()]:
        reporter.note_once(f"warning: {note}")
    taking_part.check_lengths([*clients.values(), server] if every else [server])
    clients = clients if every else taking_part.choose(clients, method)
    requested = tuple(id for id, site in clients.items() if site.train) or tuple(clients)
    schedule = schedule_of(config, requested, secret)
    if method.gathers:
        parts: list[Any] = [site.train for site in clients.values()]
        gathered: Any = ConcatDataset(parts)  # each example is made when it is looked at
        server.data = replace(server.data, train=gathered, foreign=False)
    return clients, replace(server, clients=requested, cohort=schedule.cohort_size), schedule


def structures(config: Config, method: Method, base: Kind, clients: Sequence[str]) -> dict[str, Structure]:
    """What the server of a network knows of its clients' structures, where they differ in rank. UserError:
    `adapter.rank` gives other clients a rank."""
    adapter = config.adapter
    if adapter is None or not config.ranks_differ:
        return {}
    ranks.check(adapter.rank, clients)
    each = {id: ranks.of(adapter.rank, id, index) for index, id in enumerate(clients)}
    return {id: method.wrap(base.structure(adapter, rank=rank), None) for id, rank in each.items()}
