"""What a run says before its first round: who trains what, on which data, and, when requested, what it will cost."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.filesize import decimal

from llm_fed.basics.errors import UserError
from llm_fed.engine.memory import budget_and_overhead, free_memory, memory_limit, peak_of, weights
from llm_fed.engine.ways import describe as describe_passes
from llm_fed.experiment import cross
from llm_fed.experiment.baselines import looked_up
from llm_fed.federation.aggregation import trust
from llm_fed.federation.clients import Messages
from llm_fed.kinds import Kind
from llm_fed.method import Method
from llm_fed.method.client import Client
from llm_fed.method.requests import Fit, Fitted, Request, succeeded
from llm_fed.method.site import Site
from llm_fed.runtime.launch import processes
from llm_fed.runtime.local import LocalRuntime, drive
from llm_fed.settings.config import Config
from llm_fed.state.wire import Message, entries, pack, unpack

if TYPE_CHECKING:
    from llm_fed.bench.build import Experiment

SPLITS = ("training", "validation", "test")


@dataclass(frozen=True)
class CountSummary:
    """Numbers of several clients."""

    total: int = 0
    least: int = 0
    most: int = 0

    @classmethod
    def of(cls, numbers: Iterable[int]) -> CountSummary:
        counts = list(numbers)
        return cls(sum(counts), min(counts), max(counts)) if counts else cls()

    def each(self) -> str:
        """`16`, or `3 to 120`."""
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class Costs:
    """What a run will move and hold, in bytes.

    Attributes:
        down, up: of what one client is sent in round 1, and of its answer.
        down_run, up_run: over the whole run, if each client moves in every round what it moves in the first.
        base: the weights of the base and of clients' own models.
        step: what a training step of the clients that train at once takes beside it, by a measured step; None where no
            client trains here.
        memory_free: on the device, with the base loaded.
        memory_limit: what allows no more, where the machine has more: a container's or a job's limit.
        smaller: settings that would make less of it necessary.
        state: the server's part of a checkpoint.
        disk_free: where the run folder is, or will be.
    """

    down: CountSummary
    up: CountSummary
    down_run: int
    up_run: int
    base: int
    step: int | None
    memory_free: int
    smaller: tuple[str, ...]
    state: int
    disk_free: int
    memory_limit: str = ""

    def rows(self, several: bool = False) -> dict[str, str]:
        """Lines for people, by their label. `several`: whether messages are those of more than one run."""
        rows = {"messages": self._messages(several), "memory": self._memory()}
        if self.step is not None:
            rows["fits"] = f"yes, about {decimal(self.memory_free - self.step)} would be left"
        within = f"; limited by {self.memory_limit}" if self.memory_limit else ""
        memory = f"{decimal(self.memory_free)} of memory (with the base loaded{within})"
        free = f"{memory}, {decimal(self.disk_free)} of disk"
        return {**rows, "disk": f"{decimal(self.state)} per checkpoint for the server's state", "free": free}

    def _messages(self, several: bool) -> str:
        if not self.down_run and not self.up_run:
            return "nothing is sent"
        each = f"a client receives {self.down.each()} bytes and sends {self.up.each()} in round 1; "
        whole = f"about {decimal(self.down_run)} down and {decimal(self.up_run)} up in the whole run"
        return whole if several else each + whole

    def _memory(self) -> str:
        if self.step is None:
            return f"{decimal(self.base)} for the base"
        return (
            f"about {decimal(self.base + self.step)} to train: base {decimal(self.base)}, and a training step "
            f"{decimal(self.step)} (measured); scoring is not included"
        )

    def check(self) -> None:
        """Refuse what does not fit: a CPU has no error for want of memory, it kills. UserError: what is too large, and
        settings that need less."""
        if self.step is not None and self.step > self.memory_free:
            change = f"; these settings need less: {', '.join(self.smaller)}" if self.smaller else ""
            raise UserError(
                f"a training step takes about {decimal(self.step)} of memory beside the base, and "
                f"{decimal(self.memory_free)} are free{change}"
            )


@dataclass(frozen=True)
class RunPlan:
    """What a run is about to do."""

    method: str
    lines: Mapping[str, str]  # for people, by their label
    rounds: int
    reached: int  # the round after which it goes on; 0: it begins
    complete: bool  # whether it has ended already
    # By split, over the clients that have any; empty where the clients' data are not here.
    example_counts: Mapping[str, CountSummary]
    parameters: CountSummary  # that each client holds and trains
    total_steps: int = 0  # of a client in the whole run, on the mean; 0 where that is not known
    own_steps: int = 0  # of these the ones after the last round
    costs: Costs | None = None
    parents: tuple[RunPlan, ...] = field(default=(), repr=False)  # of runs that it merges, where costs are requested

    def rows(self) -> dict[str, str]:
        """Lines for people, by their label; of a run that goes on what may have changed."""
        shown = ("method", "base") if self.reached or self.complete else self.lines
        return {label: self.lines[label] for label in shown}

    def for_terminal(self, folder: Path) -> list[str]:
        """All lines of a dry run, aligned: what lies in the folder first, then the whole plan with its costs."""
        if self.complete:
            here = f"{folder} is complete, so nothing would be done; --fresh starts again"
        elif self.reached:
            here = f"{folder} would continue at round {min(self.reached + 1, self.rounds)} of {self.rounds}"
        else:
            here = f"{folder} would be a new run"
        prices = {} if self.costs is None else self.costs.rows(several=bool(self.parents))
        return [f"{label:<11}{text}" for label, text in ({"run": here} | dict(self.lines) | prices).items()]


def run_plan(
    built: Experiment, *, reached: int = 0, complete: bool = False, names: Sequence[str] = (), work: bool = False
) -> RunPlan:
    """What an experiment is about to do.

    Args:
        reached: the round of the checkpoint from which it continues; 0: it begins.
        names: the clients, where their data are on other machines.
        work: whether the method is asked how many steps a client takes.
    """
    config, base, method, server, engine = built.config, built.base, built.method, built.server, built.engine
    sites = [*built.clients.values()]
    sent, requested = None, method.requested(server.clients or names)
    if not reached:
        state = method.init(server)  # a method that cannot start here says so now, before its parents are trained
        for client in requested[:1]:
            sent = entries(method.upload_like(method.broadcast(state, client)))
    here = [site.local.steps_on(site.num_examples) for site in sites if site.train]
    steps = CountSummary.of(here if sites else [config.local.steps or 0])
    total, own = _steps(built, steps) if work and requested else (0, 0)
    alone = f", {own:,} of them alone after the last round" if own else ""
    held = {"training": [len(site.train) for site in sites]}
    held |= {split: [len(site.data.queries.get(split, ())) for site in sites] for split in SPLITS[1:]}
    examples = {split: CountSummary.of(numbers) for split, numbers in held.items()} if sites else {}
    parameters = _parameters(built)
    lines = {
        "method": f"{config.method['name']}{f': {method.paper}' if method.paper else ''}, "
                  f"{method.describe(config.rounds)}",
        "clients": _clients([*built.clients] or names, server.cohort),
        "examples": _describe_examples(examples, server, sites),
        "look-up": looked_up(built),
        **(built.reading.for_people() if built.reading else {}),
        "base": _base(built),
        "training": _training(built, parameters, sent),
        "loss": config.objective.describe() if config.objective.preferences else "",
        "each round": _work(config, steps) if requested else "",
        "trust": trust(config, method) if requested else "",
        "work": f"about {total:,} steps of a client in all{alone}" if total else "",
        "passes": describe_passes(engine.ways, base.device, adapters=server.structure.fused, untried=engine.untried),
        "scores": _scored(built, bool(sites), bool(requested)),
        "cross": cross.planned(built).describe() if sites else "",
    }  # fmt: skip
    return RunPlan(
        config.method["name"], {label: text for label, text in lines.items() if text}, config.rounds, reached, complete,
        examples, parameters, total, own,
    )  # fmt: skip


def _steps(built: Experiment, of_round: CountSummary) -> tuple[int, int]:
    """The steps of a client in the whole run, on the mean, and of these the ones after the last round."""
    server, method = built.server, built.method
    own = 0 if type(method).finish is Method.finish else steps_of(built, method.finish)
    each = steps_of(built, method.client_update) or (
        of_round.total / len(built.trainers) if built.clients else of_round.most
    )
    return own + round(built.config.rounds * each * server.cohort / max(1, len(server.clients))), own


def _parameters(built: Experiment) -> CountSummary:
    base, frozen = built.base, built.config.local.freeze
    structures = [site.structure for site in built.clients.values()] or [built.server.structure]
    layouts = {structure: base.layout(structure) for structure in {*structures}}
    return CountSummary.of(
        sum(math.prod(layout.shape_of[name]) for name in {*layout.matching(built.method.trained)}
            - {*(() if frozen is None else layout.matching(frozen, "local.freeze"))})
        for layout in map(layouts.__getitem__, structures)
    )  # fmt: skip


def _clients(names: Sequence[str], cohort: int) -> str:
    number = len(names)
    if number == 1:
        return f"1, {names[0]}"
    return f"{number}, {'all' if cohort >= number else cohort} of them sampled in each round"


def _describe_examples(counts: Mapping[str, CountSummary], server: Site, sites: Sequence[Site]) -> str:
    held = dict(zip(SPLITS, (len(server.train), *(len(server.data.queries.get(split, ())) for split in SPLITS[1:])),
                    strict=True))  # fmt: skip
    if not counts and not any(held.values()):
        return "only known to the clients"
    words = {"training": "for training", "validation": "for validation", "test": "for testing"}
    parts = [f"{own.total:,} {words[split]} ({own.each()} per client)" for split, own in counts.items() if own.total]
    at_server = [f"{number:,} {words[split]}" for split, number in held.items() if number]
    parts += [f"at the server {' and '.join(at_server)}"] if at_server else []
    left_out = sum((Counter(site.data.left_out) for site in [*sites, server]), Counter())
    out = [f"{number:,} {split}" for split, number in left_out.items()]
    return ", ".join(parts) + (f"; left out because too long: {' and '.join(out)}" if out else "")


def _base(built: Experiment) -> str:
    config, base = built.config.base, built.base
    held = str(base.dtype).removeprefix("torch.")
    computed = str(base.autocast or base.dtype).removeprefix("torch.")
    dtype = held if held == computed else f"{held}, computed in {computed}"
    device = str(base.device) + ("" if base.device.type == "cpu" else f" ({torch.cuda.get_device_name(base.device)})")
    return (
        f"{config.name}{' (shared)' if config.clients else ''}, {base.num_parameters:,} parameters, {dtype}"
        f"{f', {config.quantization}' if config.quantization else ''}, on {device} in "
        f"{_count(processes(), 'process', 'processes')}"
    )


def _training(built: Experiment, parameters: CountSummary, sent: int | None) -> str:
    """Args: sent: parameters in a client's answer; None: not looked at, as the run goes on from a checkpoint."""
    structures = [site.structure for site in built.clients.values()] or [*built.server.structures.values()]
    said = ""
    if sent is not None and sent != parameters.most:
        said = f", of which {sent:,} are sent" if sent else ", none of which are sent"
    elif sent is not None:
        said = ", all of which are sent"
    first = (structures or [built.server.structure])[0]
    what = first.describe([each.rank for each in structures] if first.fused else ())
    return f"{what}: {parameters.each()} parameters per client{said}"


def _work(config: Config, steps: CountSummary) -> str:
    examples = _count(config.local.batch_size, "example")
    said = f"{steps.each()} steps of {examples}" if steps.most else f"steps of {examples}"
    if config.local.epochs:
        epochs = _count(config.local.epochs, "epoch")
        said = f"{epochs}, {said}" if steps.most else f"{epochs} in {said}"
    first, last = config.local.lr, config.local.lr_end
    rate = f"{first:g}" if first == last or config.rounds == 1 else f"{first:g}, decaying to {last:g} in the last"
    return f"{said}, learning rate {rate}"


def with_costs(plan: RunPlan, built: Experiment, folder: Path, parents: Sequence[RunPlan] = ()) -> RunPlan:
    """The plan with its costs, for which method and engine are asked; the experiment must not be trained afterwards.
    UserError: a training step takes more memory than is free, as a CPU has no error for want of memory. `folder`: the
    run folder, which need not exist. `parents`: the plans, with costs, of the runs that this one starts from."""
    config, base, method = built.config, built.base, built.method
    sites, down, up = built.trainers or built.clients, {}, {}
    state = method.init(built.server)
    requested = Messages(method, state, method.requested([*sites]), config.transport)
    for client, sent in requested.all_packed().items():
        down[client], up[client] = len(sent), len(pack(method.upload_like(unpack(sent)), config.transport))
    asks = [ask for round in range(1, config.rounds + 1) for ask in built.schedule.asks(round)] if down else []
    trainers = sorted((sites[id] for id in down if sites[id].train), key=partial(_size, base), reverse=True)
    at_once = min(built.runtime.clients_per_pass, built.server.cohort)
    prices = [parent.costs for parent in parents if parent.costs]
    models = [base.model, *map(base.model_of, {site.structure: None for site in sites.values() if site.train})]
    fewer = [f"clients_per_pass={max(1, at_once // 2)}"] * (at_once > 1)
    costs = Costs(
        down=CountSummary.of(down.values()), up=CountSummary.of(up.values()),
        down_run=sum(down[ask.client] for ask in asks) + sum(price.down_run for price in prices),
        up_run=sum(up[ask.client] for ask in asks if ask.delay is not None) + sum(price.up_run for price in prices),
        base=weights(models), step=None,
        memory_free=free_memory(base.device), memory_limit=memory_limit(base.device),
        smaller=(*fewer, *base.saves(config.base)), state=len(pack(state)),
        disk_free=shutil.disk_usage(next(p for p in [folder, *folder.absolute().parents] if p.is_dir())).free,
    )  # fmt: skip
    if trainers and base.device.type == "cpu":
        replace(costs, step=_expected_peak(built, state, trainers[:at_once])).check()
    if trainers:
        costs = replace(costs, step=_peak(built, state, trainers[:at_once]))
        costs.check()
    return replace(plan, costs=costs, parents=tuple(parents))


def _expected_peak(built: Experiment, state: Message, sites: Sequence[Client]) -> int:
    """Bytes that a step of these clients will take, by steps of the first one on one example and on two."""
    one, two = (_peak(built, state, sites[:1], size) for size in (1, 2))
    rows, together = min(sites[0].local.batch_size, sites[0].num_examples), 1
    if sites[0].structure.fused:  # whole models are trained one after another, and their batches are not divided
        together, (budget, _) = len(sites), budget_and_overhead(built.base.device)
        rows = max(1, min(budget // _size(built.base, sites[0])[0], together * rows))
    return one * together + (two - one) * (rows - 1)


def _peak(built: Experiment, state: Message, sites: Sequence[Client], size: int | None = None) -> int:
    """Bytes that one step of these clients takes at the most, on `size` examples (default: as configured); what they
    learn and remember is forgotten."""
    method = built.method
    messages = Messages(method, state, [site.id for site in sites], built.config.transport).all_packed()

    def step() -> None:
        work = {site.id: method.client_update(_copied(site, 1, size), unpack(messages[site.id])) for site in sites}
        succeeded(LocalRuntime(copy(built.engine), len(work)).run(work))

    return peak_of(step, built.base.device)


def steps_of(built: Experiment, step: Callable[[Client, Any], Coroutine[Any, Any, Any]]) -> int:
    """The optimizer steps that the first client asks for in a step of the method; 0 where that does not train, or it
    cannot be known without training."""
    if not built.trainers:
        return 0
    first = next(iter(built.trainers.values()))
    site, counted = _copied(first, first.local.steps_on(first.num_examples)), 0

    def count(requests: Sequence[Request[Any]]) -> Sequence[Fitted | Exception]:
        nonlocal counted
        fits = [requested for requested in requests if isinstance(requested, Fit)]
        counted += sum(len(requested.batches) for requested in fits)
        return [Fitted(requested.start, (0.0,)) for requested in fits] or [NotImplementedError()] * len(requests)

    with suppress(Exception):  # what fails here says so in the run
        messages = Messages(built.method, built.method.init(built.server), [site.id], built.config.transport)
        drive({site.id: step(site, messages[site.id])}, count)
    return counted


def _copied(site: Client, steps: int, size: int | None = None) -> Client:
    """A client before round 1, which takes so many steps, of so many examples where they are given, and whose use
    leaves no trace."""
    twin = copy(site)
    twin.memory = {}
    twin.local = replace(site.local, steps=steps, epochs=None, batch_size=size or site.local.batch_size)
    twin.begin(1, site.local.lr)
    return twin


def _scored(built: Experiment, here: bool, in_rounds: bool) -> str:
    settings, rounds = built.config.eval, built.config.rounds
    where = "the server's" if "server" in built.scored else "the clients'"
    has = {split for site in built.scored.values() for split, queries in site.data.queries.items() if queries}
    if not in_rounds:
        return f"{built.metric} on {where} test examples after merging" if "test" in has else "no test examples"
    if settings.during not in has and here:
        during = f"no {settings.during} examples, so no scores during training"
    else:
        every = f"every {settings.every} rounds" + (" and after the last" if rounds % (settings.every or 1) else "")
        every = "after the last round" if not 0 < settings.every < rounds else every
        every = "after every round" if settings.every == 1 else every
        during = f"{built.metric} on {where} {settings.during} examples {every}"
        if (patience := built.config.stop.patience) is not None:
            during += f" until {patience} in a row bring no improvement"
    best = settings.select == "best" and settings.during in has | (set() if here else {settings.during})
    tested = "the best round" if best else "the last round"
    return during + (f"; {tested} is tested" if "test" in has or not here else "; no test examples")


def _size(base: Kind, site: Site) -> tuple[int, int]:
    """By which the site is found that needs most memory: the length of its longest example, and what it trains."""
    return max(map(base.examples(site.structure).length, site.train)), base.layout(site.structure).size


def _count(number: int, what: str, several: str = "") -> str:
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"
