"""Builds what a configuration names: base, task, the sites with their data, method, schedule, runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from llm_fed import kinds, methods, tasks
from llm_fed.basics import launchers, signs
from llm_fed.basics.errors import UserError, require
from llm_fed.basics.rng import generator
from llm_fed.bench import start, taking_part
from llm_fed.bench.needed import check_rounds
from llm_fed.federation import aggregation, privacy
from llm_fed.federation.schedule import Delayed, Poisson, Schedule
from llm_fed.kinds import Kind
from llm_fed.method import Method
from llm_fed.method.site import Data, Site
from llm_fed.models import ranks, room
from llm_fed.models.loading import settle_dtype
from llm_fed.models.structure import Structure, structure_of
from llm_fed.rows.reading import Reading
from llm_fed.runs.tracking import Reporter, check_trackers
from llm_fed.runtime.accelerate import Shared, Spread
from llm_fed.runtime.launch import Ranks, choose_device
from llm_fed.runtime.local import LocalRuntime, choose_clients_per_pass
from llm_fed.scoring.evaluation import Personal, check_options, evaluate
from llm_fed.scoring.notes import notes_on_length, notes_on_scores
from llm_fed.scoring.scores import METRICS, Summary
from llm_fed.settings.config import LIKELIHOOD, Config
from llm_fed.state import State
from llm_fed.state.wire import Message
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.record import Record


@dataclass
class Experiment:
    """Everything that a run needs, in memory."""

    config: Config
    base: Kind
    metric: str
    method: Method
    clients: dict[str, Site]
    server: Site
    schedule: Schedule
    engine: Any  # of this process, see `Kind.engine`
    runtime: LocalRuntime
    left_out: tuple[str, ...] = ()  # of the data's clients those that have nothing to train on
    reading: Reading | None = None  # what became of the user's own files
    record: Record | None = None  # of the rows and their splits; None: the task was given
    known: Record | None = None  # what was known of these rows before

    @property
    def trainers(self) -> dict[str, Site]:
        """The clients that train."""
        return taking_part.trainers(self.clients)

    @property
    def only_tested(self) -> tuple[str, ...]:
        """The clients that are scored, and do not train."""
        return tuple(id for id, site in self.clients.items() if not site.train)

    @property
    def unscored(self) -> tuple[str, ...]:
        """The clients that train, and have no test example."""
        if self.scored is not self.clients:
            return ()
        return tuple(id for id, site in self.clients.items() if not site.data.queries["test"])

    @property
    def apart(self) -> dict[str, list[str]]:
        """The clients that do not train, by what becomes of them, for the run's files; empty where all train."""
        kinds = {"only_tested": [*self.only_tested], "left_out": [*self.left_out]}
        return {kind: names for kind, names in kinds.items() if names}

    @property
    def scored(self) -> dict[str, Site]:
        """Who is scored: every client, or the server alone where it holds the test examples."""
        return scored(self.clients, self.server)

    def evaluate(self, messages: Mapping[str, Message], split: str, **options: Any) -> Summary | None:
        """The score of everybody who is scored, under the model that the method makes of what this one is sent;
        `options` are those of `eval.clients.evaluate`."""
        return self.score(lambda site: self.method.personalize(site, messages[site.id]), split, **options)

    def score_states(self, states: Mapping[str, State], split: str, **options: Any) -> Summary | None:
        """The score of everybody who is scored, each under its own state."""

        async def personal(site: Site) -> State:
            return states[site.id]

        return self.score(personal, split, **options)

    def score(self, personal: Personal, split: str, **options: Any) -> Summary | None:
        """The score of everybody who is scored, under the model that `personal` gives it."""
        limit = self.config.eval.limit
        return evaluate(personal, self.scored, self.runtime, split=split, metric=self.metric, limit=limit, **options)

    @property
    def scores_base(self) -> bool:
        """Whether the base without any adapter is scored on the test split."""
        asked = self.config.eval.base
        return asked is True or (asked == "auto" and self.base.knows)

    def score_base(self, split: str, **options: Any) -> Summary | None:
        """The scores without training; `options` as of `evaluate`."""
        bare, state = self.untrained()

        async def personal(site: Site) -> State:
            return state

        limit = self.config.eval.limit
        return evaluate(personal, bare, self.runtime, split=split, metric=self.metric, limit=limit, **options)

    def untrained(self) -> tuple[dict[str, Site], State]:
        """Everybody who is scored with a plain adapter, and the state of one whose B is zero, which adds nothing."""
        structure = structure_of(self.config.adapter, self.base.head)
        draw = partial(self.base.draw, structure)
        bare = {id: replace(site, structure=structure, draw=draw) for id, site in self.scored.items()}
        return bare, draw(generator(self.config.training_seed, "base"))

    def shared(self) -> Shared:
        """What all ranks of a launch build alike."""
        return Shared.of(self.engine, [*self.clients.values(), self.server], self.base, self.method)

    def spread(self, ranks: Ranks) -> Experiment:
        """The same with its clients' work spread over all ranks.

        Raises:
            UserError, RunError: another rank cannot build it, or has built something else.
        """
        known = None if self.known is None else self.known.as_json()
        engine = Spread(ranks, self.config, self.shared(), known)
        return replace(self, runtime=LocalRuntime(engine, self.runtime.clients_per_pass))


def prepare(
    config: Config,
    reporter: Reporter,
    *,
    base: Kind | None = None,
    task: tasks.common.TaskData | None = None,
    everybody: bool = True,
    known: Record | None = None,
) -> Experiment:
    """Load and build everything, the cheap and fallible parts first; the experiment's configuration says in which dtype
    it computes and how rows are held out, also where the given one says `auto`.

    Args:
        base, task: instead of what the configuration names; of such a task every client is kept, also where it has
            nothing to train on.
        everybody: whether these are all clients, and not those of one machine of a network.
        known: rows that keep the split which they had in a run.

    Raises:
        UserError: anything that the configuration names is not there or does not fit.
    """
    method = methods.build(config.method)
    check_rounds(method, config)
    check_trackers(config.track)
    privacy.check(config, method)
    aggregation.check(config, method)
    given = task is not None
    with signs.part(f"reading the data of {config.task.name}"):
        seeds = config.federation_seed, config.evaluation_seed
        task = task or tasks.load(config.task, *seeds, known, absent=not everybody)
    if config.task.held_out == "auto":
        config = replace(config, task=replace(config.task, held_out="hash"))
    metric = config.eval.metric or task.metric
    require("eval.metric", metric, METRICS)
    kind = kinds.of(config.base, bool(task.labels))
    check_kinds(kind, config, task, method, metric)
    if everybody:
        ranks.check(config.adapter, task.everybody or tuple(task.clients))
    device = str(base.device) if base else choose_device(config.device)
    for note in kind.notes(config, task):
        reporter.note_once(note)
    settled, said = settle_dtype(config.base, device)
    if said:
        config = replace(config, base=settled)
        reporter.note(said)
        if hint := kind.hint(device):
            reporter.note_once(hint)
    launchers.check_precision(config.base.dtype)
    if base is None and (too_little := room.shortage(config.base, device)):
        reporter.note(too_little)
    with signs.part(f"loading the base {config.base.name}"):
        base = base or kind.load(config, task, device)
    base = base.configured(config)
    with signs.part("preparing the clients' examples"):
        clients, server = build(config, task, base, method, metric, reporter)
    taking_part.check_lengths([*clients.values(), server] if given else [server])
    clients = clients if given else taking_part.choose(clients, method)
    if everybody:
        taking_part.check_held_out(clients, method)
    left_out = tuple(id for id in task.everybody if id not in clients)
    server.clients = tuple(taking_part.trainers(clients) or clients)
    schedule = schedule_of(config, server.clients)
    server.cohort = schedule.cohort_size
    if start.place(config):
        reporter.note(start.give(config, method, [*clients.values(), server], base))
        method.init(server)  # a method that cannot start there says so now
    cohort = schedule.cohort_size if everybody else max(1, len(clients))  # of a machine's clients all may be asked
    per_pass = choose_clients_per_pass(config.clients_per_pass, cohort, server.initial(), base.device)
    engine = base.engine(config.eval)
    runtime = LocalRuntime(engine, per_pass)
    return Experiment(
        config, base, metric, method, clients, server, schedule, engine, runtime, left_out,
        reading=task.reading, record=task.record, known=known,
    )  # fmt: skip


def schedule_of(config: Config, clients: tuple[str, ...]) -> Schedule:
    """Who is asked in which round, and how late the answers are."""
    if privacy.central(config.privacy):
        return Poisson(clients, config.participation, config.training_seed)
    late = config.delay
    return Delayed(
        clients, config.participation, config.training_seed, sigma=late.sigma, per=late.per, drop_out=late.drop_out
    )


def check_kinds(kind: type[Kind], config: Config, task: TaskData, method: Method, metric: str) -> None:
    """Refuse what does not go together, before anything is loaded.

    Raises:
        UserError: what, and what to set.
    """
    whole = kind.whole and config.adapter is None
    if not kind.whole and config.adapter is None:
        raise UserError(
            "adapter is null, but only image models can be trained whole; set adapter.rank and adapter.target_modules"
        )
    if config.local.augment and not kind.augments:
        raise UserError(f"local.augment is for images, but {config.task.name} is text; leave it out")
    if method.whole_models and not whole:
        raise UserError(
            f"{config.method['name']} trains whole image models; set adapter=null, and task.name to a task of images"
        )
    if config.base.clients and not (method.any_model and whole):
        raise UserError(
            f"base.clients gives clients different image models, but {config.method['name']} needs the same model at "
            "all of them; leave base.clients out, or choose another method"
        )
    if ranks.differ(config.adapter):
        if not method.any_rank:
            able = ", ".join(name for name, its in methods.METHODS.items() if its.any_rank)
            raise UserError(
                f"adapter.rank gives clients different ranks, but {config.method['name']} needs the same rank at all "
                f"of them; give one number, or choose {able}"
            )
        if start.place(config):
            raise UserError(
                "adapter.start gives all clients the same adapter; set adapter.rank to its rank, one number"
            )
    if config.adapter is None and method.adapters_only:
        raise UserError(
            f"{config.method['name']} trains, sends or merges parts of LoRA adapters, but adapter is null; set "
            "adapter.rank"
        )
    if METRICS[metric].scores not in kind.reads:
        given = f"eval.metric={metric}" + ("" if config.eval.metric else ", the default,")
        raise UserError(f"{given} does not fit task.name={config.task.name}; set eval.metric={task.metric} or null")
    if task.metric == LIKELIHOOD != metric:
        raise UserError(
            f"eval.metric={metric} compares answers to prompts, but the data are texts without prompts; set "
            f"eval.metric={LIKELIHOOD} or null"
        )
    if config.eval.base is True and not kind.knows:
        raise UserError(
            "eval.base=true scores the base before training, when the head of an image model is still untrained; set "
            "eval.base=auto"
        )
    if task.server and task.server.test and not method.one_model:
        raise UserError(
            f"task.server.test=true tests one global model at the server, but {config.method['name']} gives each "
            "client a personal one; set task.server.test=false"
        )


def build(
    config: Config,
    task: TaskData,
    base: Kind,
    method: Method,
    metric: str,
    reporter: Reporter,
) -> tuple[dict[str, Site], Site]:
    """(clients, server); of whom the server asks, nothing is known here.

    Raises:
        UserError: data that a metric cannot score, or none of which anything fits.
    """
    structure = structure_of(config.adapter, base.head)
    encoding = base.encoding(config, task, METRICS[metric].scores, reporter.note)

    def site(id: str, given: ClientData | None, labels: int, foreign: bool = False) -> Site:
        wrapped: Structure = method.wrap(structure, None)
        data = Data(metric=metric, num_labels=labels, foreign=foreign)
        if given is not None:
            data = encoding.data(id, given, data)
            if METRICS[metric].scores == "options":
                check_options(id, data)
        draw = partial(base.draw, wrapped)
        return Site(id, wrapped, config.local, config.training_seed, draw, data, rounds=config.rounds)

    @cache
    def own_structure(architecture: str, rank: int | None) -> Structure:
        return structure_of(config.adapter, base.head, architecture, rank)

    drawn: dict[Structure, State] = {}
    clients = {id: site(id, given, len(task.labels)) for id, given in task.clients.items()}
    listed = () if isinstance(config.network.clients, int) else config.network.clients
    places = {name: place for place, name in enumerate(task.everybody or clients)}
    places |= {name.partition("@")[0]: place for place, name in enumerate(listed)}  # of which a machine has some alone
    for client in clients.values():
        number = places[client.id]
        own = config.base.clients[number % len(config.base.clients)] if config.base.clients else ""
        rank = ranks.of(config.adapter, client.id, number)
        client.structure = method.wrap(own_structure(own, rank), client)
        client.draw = partial(base.draw, client.structure)
        client.private = privacy.of_examples(config.privacy, config.training_seed)
        if client.structure.fused:
            if client.structure not in drawn:
                drawn[client.structure] = client.initial()
            client.expect(drawn[client.structure])
    server = site("server", task.server, len(task.server_labels or task.labels), config.task.server.name is not None)
    server.step = config.server
    if ranks.differ(config.adapter):
        server.structures = {id: client.structure for id, client in clients.items()}
    if not any(site.train for site in clients.values()):
        taking_part.check_lengths(clients.values())
    if note := encoding.note():
        reporter.note(note)
    sites = [*clients.values(), server]
    for note in [*notes_on_scores(sites, metric), *notes_on_length(sites, config.eval.max_new_tokens).values()]:
        reporter.note_once(f"warning: {note}")
    return clients, server


def structures(config: Config, method: Method, base: Kind, clients: Sequence[str]) -> dict[str, Structure]:
    """What the server of a network knows of its clients' structures, where they differ in rank.

    Raises:
        UserError: `adapter.rank` gives other clients a rank.
    """
    ranks.check(config.adapter, clients)
    if not ranks.differ(config.adapter):
        return {}
    each = {id: ranks.of(config.adapter, id, place) for place, id in enumerate(clients)}
    return {id: method.wrap(structure_of(config.adapter, base.head, rank=rank), None) for id, rank in each.items()}


def scored(clients: dict[str, Site], server: Site) -> dict[str, Site]:
    """Who is scored: every client, or the server alone where it holds the test examples."""
    tested: Sequence[Any] = server.data.queries.get("test", ())
    return {server.id: server} if tested else clients
