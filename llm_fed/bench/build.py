"""Builds what a configuration names: base, task, the sites with their data, method, schedule, runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llm_fed import kinds, methods, tasks
from llm_fed.basics import launchers, signs
from llm_fed.basics.errors import UserError, panics
from llm_fed.basics.rng import Secret, generator
from llm_fed.bench import parents, start
from llm_fed.bench.sites import build
from llm_fed.federation import aggregation
from llm_fed.federation.schedule import Schedule
from llm_fed.kinds import Kind
from llm_fed.method import Method
from llm_fed.method.client import Client
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.models import ranks
from llm_fed.models.loading import settle_dtype, shortage
from llm_fed.runs.trackers import check_trackers
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.accelerate import DistributedEngine, Shared
from llm_fed.runtime.launch import Ranks, choose_device
from llm_fed.runtime.local import LocalRuntime, choose_clients_per_pass
from llm_fed.scoring.evaluation import Personal, evaluate
from llm_fed.scoring.scores import ABILITY, Summary
from llm_fed.scoring.scores import find as find_metric
from llm_fed.settings.config import LIKELIHOOD, PREFERENCE, Config
from llm_fed.settings.objects import is_object
from llm_fed.state import State
from llm_fed.state.wire import Message
from llm_fed.tasks.collected import Reading
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.record import Record

SCORED_TOGETHER = 64  # clients in a pass, where fewer are asked in a round: who is not is scored, too


@dataclass
class Experiment:
    """Everything that a run needs, in memory."""

    config: Config
    base: Kind
    metric: str
    method: Method
    clients: dict[str, Client]
    server: Server
    schedule: Schedule
    engine: Any  # of this process, see `Kind.engine`
    runtime: LocalRuntime
    left_out: tuple[str, ...] = ()  # of the data's clients those that have nothing to train on
    reading: Reading | None = None  # what became of the user's own files
    record: Record | None = None  # of the rows and their splits; None: the task was given
    known: Record | None = None  # what was known of these rows before

    @property
    def trainers(self) -> dict[str, Client]:
        """The clients that train."""
        return {id: site for id, site in self.clients.items() if site.train}

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
    def examples(self) -> dict[str, dict[str, int]]:
        """How many examples who is scored has, by split."""
        return {
            id: {"train": site.num_examples, **{split: len(own) for split, own in site.data.queries.items()}}
            for id, site in self.scored.items()
        }

    @property
    def scored(self) -> Mapping[str, Site]:
        """Who is scored: every client, or the server alone where it holds the test examples."""
        return {self.server.id: self.server} if self.server.data.queries.get("test") else self.clients

    def evaluate(self, messages: Mapping[str, Message], split: str, *, each: bool = False) -> Summary | None:
        """The score of everybody who is scored, under the model that the method makes of what this one is sent."""
        return self.score(lambda site: self.method.personalize(site, messages[site.id]), split, each=each)

    def score(
        self, personal: Personal, split: str, *, each: bool = False, sites: Mapping[str, Site] | None = None
    ) -> Summary | None:
        """The score of everybody who is scored, or of these `sites` in their place, each under its own model; `each` as
        of `evaluate`."""
        who, limit = sites or self.scored, self.config.eval.limit
        return evaluate(personal, who, self.runtime, split=split, metric=self.metric, limit=limit, each=each)

    @property
    def scores_base(self) -> bool:
        """Whether the base without any adapter is scored on the test split."""
        return self.config.eval.base is not False and self.base.knows

    def score_base(self, split: str, *, each: bool = False) -> Summary | None:
        """The scores without training; `each` as of `evaluate`."""
        bare, state = self.untrained()
        scored = [id for id, site in bare.items() if site.data.queries.get(split)]
        for id in scored[1:]:  # all have one model, which is measured once
            bare[id] = replace(bare[id], data=replace(bare[id].data, ability=()))
        summary = self.score(dict.fromkeys(bare, state), split, each=each, sites=bare)
        if summary and (known := summary.beside.get(ABILITY)):
            everybody = dict.fromkeys(summary.clients, next(iter(known.values())))
            return replace(summary, beside={**summary.beside, ABILITY: everybody})
        return summary

    def untrained(self) -> tuple[dict[str, Site], State]:
        """Everybody who is scored with a plain adapter, and the state of one whose B is zero, which adds nothing."""
        structure = self.base.structure(self.config.adapter)
        draw = partial(self.base.draw, structure)
        bare = {id: replace(site, structure=structure, draw=draw) for id, site in self.scored.items()}
        return bare, draw(generator(self.config.training_seed, "base"))

    def shared(self) -> Shared:
        """What all ranks of a launch build alike."""
        return Shared.of(self.engine, [*self.clients.values(), self.server], self.base, self.method)

    def spread(self, ranks: Ranks) -> Experiment:
        """This experiment with its clients' work spread over all ranks. UserError, RunError: another rank cannot build
        it, or has built something else."""
        known = None if self.known is None else self.known.as_json()
        engine = DistributedEngine(ranks, self.config, self.shared(), known)
        return replace(self, runtime=LocalRuntime(engine, self.runtime.clients_per_pass))


@panics("the base's tokenizer")
def prepare(
    config: Config,
    reporter: Reporter,
    *,
    base: Kind | None = None,
    task: tasks.common.TaskData | None = None,
    everybody: bool = True,
    known: Record | None = None,
    secret: Secret | None = None,
) -> Experiment:
    """Load and build everything, the cheap and fallible parts first; the experiment's configuration says in which dtype
    it computes and how rows are held out, also where the given one says `auto`, and its rounds are those that clients
    train together. UserError: anything that the configuration names is not there or does not fit.

    Args:
        base, task: instead of what the configuration names; of such a task every client is kept, also where it has
            nothing to train on.
        everybody: whether these are all clients, and not those of one machine of a network.
        known: rows that keep the split which they had in a run.
        secret: of a run with privacy (default: one that nobody keeps).
    """
    method = methods.build(config.method)
    if method.parents:
        parents.check(config, method)
    if config.track.with_:
        check_trackers(config.track)
    aggregation.check(config, method)
    if method.gathers and not everybody:
        name = config.method["name"]
        raise UserError(f"{name} gathers the rows of all clients in one place, which a network is there to avoid")
    given = task is not None
    with signs.part(f"reading the data of {config.task.name}"):
        seeds = config.federation_seed, config.evaluation_seed
        task = task or tasks.load(config.task, *seeds, known, absent=not everybody)
    metric = config.eval.metric or (PREFERENCE if config.objective.preferences else task.metric)
    find_metric(metric)
    kind = kinds.of(config.base, task.base_kind)
    check_kinds(kind, config, task, method, metric)
    if everybody and config.adapter and config.ranks_differ:
        ranks.check(config.adapter.rank, task.everybody or tuple(task.clients))
    device = str(base.device) if base else choose_device(config.device)
    for note in kind.notes(config, task):
        reporter.note_once(note)
    settled, said = settle_dtype(config.base, device)
    if config.base.dtype != "float32" and (hint := kind.hint(config.base, device)):
        reporter.note_once(hint)
    if said:
        config = replace(config, base=settled)
        reporter.note(said)
    launchers.check(config.base.dtype)
    if base is None and not is_object(config.base.name) and (too_little := shortage(config.base, device)):
        reporter.note(too_little)
    with signs.part(f"loading the base {config.base.name}"):
        base = base or kinds.load(config, task, device)
    base = base.configured(config)
    with signs.part("preparing the clients' examples"):
        if config.privacy.clip is not None:
            secret = secret or Secret.fresh()
        clients, server, schedule = build(config, task, base, method, metric, reporter, secret, every=given)
    config = replace(config, rounds=method.together(config.rounds))
    if everybody and method.without_held_out and not any(site.data.held_out for site in clients.values()):
        raise UserError(
            "this method's settings ask for validation examples of the clients, but none has any; set task.validation "
            "above 0"
        )
    left_out = tuple(id for id in task.everybody if id not in clients)
    if config.start:
        reporter.note(start.give(config, method, [*clients.values(), server], base))
        method.init(server)  # a method that cannot start there says so now
    cohort = schedule.cohort_size if everybody else max(1, len(clients))  # of a machine's clients all may be asked
    together = max(cohort, min(len(clients), SCORED_TOGETHER))
    per_pass = choose_clients_per_pass(config.clients_per_pass, together, server.initial(), base.device)
    engine = base.engine(config.eval)
    engine.configure(config.engine, clients.values(), base.captures)
    runtime = LocalRuntime(engine, per_pass)
    return Experiment(
        config, base, metric, method, clients, server, schedule, engine, runtime, left_out,
        reading=task.reading, record=task.record, known=known,
    )  # fmt: skip


def check_kinds(kind: type[Kind], config: Config, task: TaskData, method: Method, metric: str) -> None:
    """Refuse what does not go together, before anything is loaded. UserError: what, and what to set."""
    whole = kind.whole and config.adapter is None
    if not kind.whole and config.adapter is None:
        raise UserError(
            "adapter is null, but only image models can be trained whole; set adapter.rank and adapter.target_modules"
        )
    if config.objective.preferences and "preferences" not in kind.reads:
        raise UserError(
            f"objective.name={config.objective.name} learns which answer is preferred, but a {kind.noun} writes no "
            "answers; leave objective out, or choose another task"
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
    if config.ranks_differ:
        if not method.any_rank:
            able = ", ".join(name for name, kind_of_method in methods.METHODS.items() if kind_of_method.any_rank)
            raise UserError(
                f"adapter.rank gives clients different ranks, but {config.method['name']} needs the same rank at all "
                f"of them; give one number, or choose {able}"
            )
        if config.start:
            raise UserError(
                "adapter.start gives all clients the same adapter; set adapter.rank to its rank, one number"
            )
    if config.adapter is not None and config.adapter.dora:
        if method.adapters_only or method.parents or config.ranks_differ:
            raise UserError(
                f"adapter.dora=true trains magnitudes beside A and B, and {config.method['name']} computes with "
                "products of A and B, or with ranks that differ, which have none; set adapter.dora=false, or choose a "
                "method that averages entries, such as fedit"
            )
        if config.base.quantization:
            raise UserError("adapter.dora needs the base's own weights; set base.quantization=null")
    if config.adapter is None and method.adapters_only:
        raise UserError(
            f"{config.method['name']} trains, sends or merges parts of LoRA adapters, but adapter is null; set "
            "adapter.rank"
        )
    scored = find_metric(metric, labelled=bool(task.labels))
    if scored.scores not in kind.readable(task):
        given = f"eval.metric={metric}" + ("" if config.eval.metric else ", the default,")
        raise UserError(f"{given} does not fit task.name={config.task.name}; set eval.metric={task.metric} or null")
    if scored.two_labels and len(task.labels) > 2:
        raise UserError(
            f"eval.metric={metric} is of two labels, and the data have {len(task.labels)}; set eval.metric=f1_macro"
        )
    if task.metric == LIKELIHOOD != metric:
        raise UserError(
            f"eval.metric={metric} compares answers to prompts, but the data are texts without prompts; set "
            f"eval.metric={LIKELIHOOD} or null"
        )
    if task.server and task.server.test and not method.one_model:
        raise UserError(
            f"task.server.test=true tests one global model at the server, but {config.method['name']} gives each "
            "client a personal one; set task.server.test=false"
        )
