"""How long a run will take, from a few steps and answers of its own that are timed before it begins.

What is timed changes nothing: it is the work of copies of the clients and of the engine, whose results nobody keeps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState

from llm_fed.basics import signs
from llm_fed.bench.build import Experiment
from llm_fed.engine.batch_limits import most_rows
from llm_fed.engine.generation import seconds_of_tokens
from llm_fed.experiment import cross
from llm_fed.experiment.announce import copied, local_steps, steps_of
from llm_fed.experiment.baselines import Baselines
from llm_fed.experiment.samples import Samples
from llm_fed.federation.clients import broadcast
from llm_fed.method.client import Client
from llm_fed.method.site import Site
from llm_fed.models import speed
from llm_fed.runs.forecast import Forecast, Span
from llm_fed.runs.pace import Ahead
from llm_fed.runtime.local import LocalRuntime
from llm_fed.scoring.scores import CLASSIFIED, find
from llm_fed.state.wire import unpack

clock = time.perf_counter
SHARE = 0.02  # of a run's steps, and of its answers, that is timed at most
SHORT = 10.0  # seconds; of a run that trains and scores in less nothing is said
BRIEF = 2.0  # seconds; what takes longer is timed once
TOKENS = 4  # of each answer, that are timed
REPORT = Span(1.0, 5.0)  # seconds that the report takes, as measured on two cores
MODEL = Span(0.01, 0.05)  # of one client's exported model


def with_forecast(experiment: Experiment, plan: Ahead, reached: int = 0) -> Ahead:
    """What a run will do, with a forecast of what follows the round `reached`.

    There is none for a run of some seconds, for one without training clients here, and where a timed step fails: what
    fails here fails in the run, too, which then says where.
    """
    sites, rounds = _asked(experiment), plan.rounds - reached
    if not sites or not rounds:
        return plan
    try:
        with signs.part("estimating the time"), signs.heard_by(None):
            training, (answer, base_answer) = _Timed(experiment).round(sites, rounds), _answers(experiment, plan)
            scoring = answer * plan.answers_after(reached) + base_answer * plan.base_answers
            if (training * (rounds + plan.final_rounds) + scoring).high < SHORT:
                return plan
            processes = PartialState().num_processes
            remark = "" if torch.cuda.is_available() else speed.crowded()
            ending = _ending(experiment)
            forecast = Forecast(training / processes, answer / processes, base_answer / processes, ending, remark)
            return replace(plan, forecast=forecast)
    except Exception:
        return plan


def ahead(built: Experiment, baselines: Baselines | None = None) -> Ahead:
    """What a run will do.

    Args:
        baselines: what need not be scored, as other runs of this command have done so.
    """
    config, sites, limit = built.config, built.scored.values(), built.config.eval.limit
    steps = {id: local_steps(site) for id, site in built.clients.items() if site.train}

    def expected(round: int) -> float:
        return sum(steps.get(ask.client, 0) for ask in built.schedule.asks(round) if ask.delay is not None)

    def answers(split: str) -> int:
        counts = [len(site.data.queries.get(split, ())) for site in sites]
        return sum(min(count, limit or count) for count in counts)

    by_split = {split: answers(split) for split in ("validation", "test")}
    baselines, base = baselines or Baselines(), 0
    if built.scores_base and not baselines.knows(built):
        base = by_split["test"] + (by_split[config.eval.during] if config.eval.base is True else 0)
    elif not baselines.answers(built):
        base = Samples(built).asked
    final, first = final_steps(built), expected(1)
    return Ahead(
        config.rounds,
        expected if steps else lambda round: 0.0,
        lambda round: round == config.rounds or bool(config.eval.every and round % config.eval.every == 0),
        config.eval.during,
        by_split,
        base,
        final,
        final / first if first else 0.0,
        elsewhere=not sites,
        cross_answers=cross.planned(built).answers if sites else 0,
        scores_after=config.eval.during != "test" and final > 0,
    )


def final_steps(built: Experiment) -> float:
    """The client steps of what the method does at the clients after the last round: those that the first client asks
    for, times the clients. 0 where that does not train, or cannot be known without training."""
    return float(steps_of(built, "finish") * len(built.trainers))


def _asked(experiment: Experiment) -> list[Client]:
    """Who trains in the first round."""
    asked = [ask.client for ask in experiment.schedule.asks(1) if ask.delay is not None]
    return [site for id in asked if (site := experiment.clients.get(id)) is not None and site.train]


class _Timed:
    """Times steps of clients, the method's own work around them included."""

    def __init__(self, experiment: Experiment):
        self._built = experiment
        self._state = experiment.method.init(experiment.server)

    def round(self, sites: Sequence[Client], rounds: int) -> Span:
        """Seconds of a round in which these clients train."""
        one, taken = self._seconds(sites[:1], 1)
        # What is timed is one step of each fit, or all that a method does whatever `local.steps` says.
        steps = fmean(local_steps(site) if taken < local_steps(site) else 1 for site in sites)
        able = int(SHARE * steps * len(sites) * rounds)
        count = min(len(sites), self._built.runtime.clients_per_pass, able)
        if count < 2:
            seconds = one * steps * len(sites)
            return Span(seconds, seconds)
        chosen = [sites[place * len(sites) // count] for place in range(count)]
        first, _ = self._seconds(chosen, 1)
        further = first
        if able >= 4 * count and steps > 1:  # what does not grow with the steps shows in more of them
            further = min(first, max(first / 10, (self._seconds(chosen, 3)[0] - first) / 2))
        seconds = (first + further * (steps - 1)) / count * len(sites)
        return Span(seconds, seconds)

    def _seconds(self, sites: Sequence[Client], steps: int) -> tuple[float, int]:
        """How long so many steps of these clients take in one pass, and how many steps the first one took."""
        built = self._built
        ids = [site.id for site in sites]
        messages = broadcast(built.method, self._state, ids, built.config.transport.down)
        for _ in (trials := _Trials()):
            copies = {site.id: copied(site, steps) for site in sites}
            work = {id: built.method.client_update(site, unpack(messages[id])) for id, site in copies.items()}
            _check(LocalRuntime(copy(built.engine), len(work)).run(work))
        return trials.least, len(copies[ids[0]].losses)


def _answers(built: Experiment, ahead: Ahead) -> tuple[Span, Span]:
    """Seconds of an answer that is scored, of a personal model and of the base."""
    splits = [split for split, number in ahead.answers.items() if number]
    if not splits:
        return Span(), Span()
    asked = [(site, site.data.queries[split]) for split in splits for site in built.scored.values()
             if site.data.queries.get(split)]  # fmt: skip
    total = ahead.answers_after(0) + ahead.base_answers
    size = most_rows(built.config.eval.batch_size, built.base.device)
    most = max(1, min(size, int(SHARE * total), ahead.answers[splits[0]]))
    site, queries = asked[0]
    if find(built.metric, labelled=bool(built.base.labels)).scores in CLASSIFIED:
        seconds = _per_item(built, lambda items: site.logits(site.initial(), items), queries[:most])
        return Span(seconds, seconds), Span()
    return _texts(built, asked, most, min(size, max(ahead.answers.values())))


def _texts(built: Experiment, asked: Sequence[tuple[Site, Any]], most: int, batch: int) -> tuple[Span, Span]:
    """The same of texts.

    Args:
        asked: who is asked which queries.
        most: how many of them may be timed.
        batch: how many will be answered at once.
    """
    bare, state = built.untrained()
    queries = [query for _, of_site in asked for query in of_site[: -(-most // len(asked))]][:most]
    site = next(iter(bare.values()))
    loss = _per_item(built, lambda items: site.loss_of_answers(state, items), queries)
    if find(built.metric).scores == "options":
        one = _per_item(built, lambda items: site.option_scores(state, items), queries) + loss
        return Span(one, one), Span(one, one)
    bank = built.engine.bank(site.structure, [state])
    prompts = [(0, query.prompt) for query in queries]
    first, further = seconds_of_tokens(built.base, bank, prompts, TOKENS)
    if first < BRIEF:
        again = seconds_of_tokens(built.base, bank, prompts, TOKENS)
        first, further = min(first, again[0]), min(further, again[1])
    # Between reading the weights once for the whole batch, and work that grows with it.
    token = Span(further / batch, max(further / batch, further / len(prompts)))
    longest = built.config.eval.max_new_tokens
    answers = [getattr(query.example, "texts", (query.example,))[0] for query in queries if query.example]
    lengths = [min(longest, sum(answer.target)) for answer in answers] or [longest]
    usual, begun = fmean(lengths), first / len(prompts) + loss

    def answering(low: float, high: float) -> Span:
        return Span(begun + token.low * low, begun + token.high * high)

    return answering(usual, min(longest, 1.5 * max(lengths))), answering(usual, longest)


def _per_item(
    built: Experiment, work: Callable[[Sequence[Any]], Coroutine[Any, Any, Any]], items: Sequence[Any]
) -> float:
    """Seconds of each of these."""
    for _ in (trials := _Trials()):
        _check(LocalRuntime(copy(built.engine), 1).run({"": work(items)}))
    return trials.least / len(items)


def _check(outcomes: Mapping[str, Any]) -> None:
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome


class _Trials:
    """Times each turn of a loop over it. The first takes longer, as memory and kernels are prepared, and what takes a
    moment may have to wait for another process: there are up to three, and the least counts.

    Attributes:
        least: seconds.
    """

    least = math.inf

    def __iter__(self) -> Iterator[None]:
        for again in (BRIEF, BRIEF / 10, 0.0):
            began = clock()
            yield
            self.least = min(self.least, clock() - began)
            if self.least > again:
                return


def _ending(built: Experiment) -> Span:
    models = 0 if built.config.export.clients == "none" else len(built.scored)
    return REPORT + MODEL * models
