"""Makes the sites of a run, the clients and the server, with their data as training and evaluation see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from llm_fed.basics.rng import derive, generator
from llm_fed.bench import taking_part
from llm_fed.bench.encoding import Encoder, Length, NoneFits
from llm_fed.bench.placement import place
from llm_fed.engine.generation import room_after
from llm_fed.federation import privacy
from llm_fed.federation.schedule import Delayed, Poisson, Schedule
from llm_fed.method import Method
from llm_fed.method.client import Client
from llm_fed.method.server import Server
from llm_fed.method.site import Data, Site
from llm_fed.models import ranks
from llm_fed.models.images import ImageBase
from llm_fed.models.loading import Base
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure, structure_of
from llm_fed.runs.tracking import Reporter
from llm_fed.scoring.evaluation import check_options
from llm_fed.scoring.notes import notes_on_length, notes_on_scores
from llm_fed.scoring.scores import METRICS
from llm_fed.settings.config import Config
from llm_fed.state import State
from llm_fed.tasks import content
from llm_fed.tasks.common import ClientData, TaskData, select


def schedule_of(config: Config, clients: tuple[str, ...]) -> Schedule:
    """Who is asked in which round, and how late the answers are."""
    if privacy.central(config.privacy):
        return Poisson(clients, config.participation, config.training_seed)
    late = config.delay
    return Delayed(
        clients, config.participation, config.training_seed, sigma=late.sigma, per=late.per, drop_out=late.drop_out
    )


def build(
    config: Config,
    task: TaskData,
    base: Base | ImageBase,
    method: Method,
    metric: str,
    reporter: Reporter,
    *,
    every: bool,
) -> tuple[dict[str, Client], Server, Schedule]:
    """The clients and the server with their data, and who is asked when.

    Args:
        every: whether clients are kept that neither train nor are scored.

    Raises:
        UserError: data that a metric cannot score, or none of which anything fits.
    """
    structure = structure_of(config.adapter, base.head)
    if isinstance(base, ImageBase):
        encoder, task = None, place(task, base.device, reporter)
    else:
        room = partial(room_after, base, wanted=config.eval.max_new_tokens)
        texts = METRICS[metric].scores == "texts"
        encoder = Encoder(
            base.tokenizer, config.task, base.prompt and base.prompt.template, base.rows, room if texts else None
        )
    parties = [*task.clients.values(), *([task.server] if task.server else [])]
    splits = (split for given in parties for split in (given.train, given.validation, given.test))
    lengths = encoder.lengths(splits) if encoder else iter(())

    def data_of(id: str, given: ClientData | None, labels: int, foreign: bool = False) -> Data:
        data = Data(metric=metric, num_labels=labels, foreign=foreign)
        if given is None:
            return data
        data = with_examples(id, given, data, encoder, config, list(islice(lengths, 3)))
        if METRICS[metric].scores == "options":
            check_options(id, data)
        return data

    @cache
    def own_structure(architecture: str, rank: int | None) -> Structure:
        return structure_of(config.adapter, base.head, architecture, rank)

    private = privacy.of_examples(config.privacy, config.training_seed)
    shared = config.local, config.training_seed
    at_server: Structure = method.wrap(structure, None)
    drawn: dict[Structure, State] = {}
    clients: dict[str, Client] = {}
    listed = () if isinstance(config.network.clients, int) else config.network.clients
    places = {name: place for place, name in enumerate(task.everybody or task.clients)}
    places |= {name.partition("@")[0]: place for place, name in enumerate(listed)}  # of which a machine has some alone
    for id, given in task.clients.items():
        own = config.base.clients[places[id] % len(config.base.clients)] if config.base.clients else ""
        plain = own_structure(own, ranks.of(config.adapter, id, places[id]))
        data = data_of(id, given, len(task.labels))
        client = Client(id, plain, *shared, partial(base.draw, plain), data, rounds=config.rounds, private=private)
        wrapped = method.wrap(plain, client)
        clients[id] = client = replace(client, structure=wrapped, draw=partial(base.draw, wrapped))
        if isinstance(wrapped, Lora):
            if wrapped not in drawn:
                drawn[wrapped] = client.initial()
            client.expect(drawn[wrapped])
    labels, foreign = len(task.server_labels or task.labels), config.task.server.name is not None
    data = data_of("server", task.server, labels, foreign)
    server = Server(
        "server", at_server, *shared, partial(base.draw, at_server), data, rounds=config.rounds, step=config.server,
        structures={id: client.structure for id, client in clients.items()} if ranks.differ(config.adapter) else {},
    )  # fmt: skip
    if not any(site.train for site in clients.values()):
        taking_part.check_lengths(clients.values())
    if encoder and (note := encoder.note()):
        reporter.note(note)
    if encoder and r"\n" in config.task.template:
        reporter.note_once(
            r"task.template holds a backslash and an n, which models will read as these two letters; for a line break, "
            "write the text in double quotes in YAML"
        )
    sites = [*clients.values(), server]
    for note in [*notes_on_scores(sites, metric), *notes_on_length(sites, config.eval.max_new_tokens).values()]:
        reporter.note_once(f"warning: {note}")
    taking_part.check_lengths([*clients.values(), server] if every else [server])
    clients = clients if every else taking_part.choose(clients, method)
    asked = tuple(taking_part.trainers(clients) or clients)
    schedule = schedule_of(config, asked)
    return clients, replace(server, clients=asked, cohort=schedule.cohort_size), schedule


def structures(config: Config, method: Method, base: Base | ImageBase, clients: Sequence[str]) -> dict[str, Structure]:
    """What the server of a network knows of its clients' structures, where they differ in rank.

    Raises:
        UserError: `adapter.rank` gives other clients a rank.
    """
    ranks.check(config.adapter, clients)
    if not ranks.differ(config.adapter):
        return {}
    each = {id: ranks.of(config.adapter, id, place) for place, id in enumerate(clients)}
    return {id: method.wrap(structure_of(config.adapter, base.head, rank=rank), None) for id, rank in each.items()}


def with_examples(
    id: str, given: ClientData, data: Data, encoder: Encoder | None, config: Config, lengths: Sequence[Sequence[Length]]
) -> Data:
    """The data with a client's examples, as training and evaluation see them.

    Args:
        encoder: of text; None: pictures.
        lengths: of the examples of the three splits, where they are text.
    """

    def scored(split: str, items: Sequence[Any]) -> Sequence[Any]:
        """In the order of which eval.limit keeps the first."""
        if config.eval.limit is None or config.seeds.evaluation is None:
            return items
        return select(items, _scored_order(given, split, config))

    splits = {"validation": scored("validation", given.validation), "test": scored("test", given.test)}
    if encoder is None:
        return replace(data, train=given.train, held_out=given.validation, queries=splits)
    before, (train, validation, test) = encoder.skipped.copy(), lengths
    none_fits: list[str] = []

    def fitting(encode: Callable[..., Sequence[Any]], split: str, *words: Any, **options: Any) -> Sequence[Any]:
        try:
            return encode(id, split, *words, **options)
        except NoneFits as error:
            none_fits.append(str(error))
            return ()

    held_out = encoder.training(id, "validation", given.validation, required=False, lengths=validation)
    known = {"validation": scored("validation", validation), "test": scored("test", test)}
    queries = {
        split: fitting(encoder.queries, split, examples, config.eval.limit, known[split])
        for split, examples in splits.items()
    }
    cut = {split: found for split, asked in queries.items() if (found := encoder.cut(asked))}
    return replace(
        data,
        train=fitting(encoder.training, "training", given.train, lengths=train),
        held_out=held_out, queries=queries, left_out=encoder.skipped - before, cut=cut, none_fits=tuple(none_fits),
    )  # fmt: skip


def _scored_order(given: ClientData, split: str, config: Config) -> list[int]:
    """The places of a split's examples in an order of `seeds.evaluation`. Where rows are held out by their hash, an
    example that is added does not change the order of the others."""
    seed, items = config.seeds.evaluation, getattr(given, split)
    assert seed is not None  # see `_encoded`
    if config.task.held_out == "position":
        draws = generator(seed, "evaluation", given.client, split)
        return list(torch.randperm(len(items), generator=draws).tolist())
    return list(np.argsort(content.drawn(content.digests(items), derive(seed, "evaluation", split))).tolist())


def scored(clients: Mapping[str, Client], server: Server) -> Mapping[str, Site]:
    """Who is scored: every client, or the server alone where it holds the test examples."""
    tested: Sequence[Any] = server.data.queries.get("test", ())
    return {server.id: server} if tested else clients
