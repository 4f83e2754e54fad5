"""Warnings over a network: each machine looks at its own clients, and the server hears figures alone. No personal model
travels, so there is no table of models on other clients' examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_fed.basics.documents import Json
from llm_fed.basics.names import rounded
from llm_fed.bench.build import Experiment
from llm_fed.experiment.baselines import line_of, rule_of
from llm_fed.experiment.watching import Scores, Warned, believed, keep, local_scores, losses_of, warnings_of
from llm_fed.method.site import Site
from llm_fed.network.link import Reply, summary_of
from llm_fed.network.refusals import each, fused
from llm_fed.runs.folder import Run
from llm_fed.scoring.evaluation import Measured, Personal, measure
from llm_fed.scoring.rules import BestRule

PRIVATE = "with privacy.clip clients say nothing of single examples, so nothing is compared on them"


@dataclass(frozen=True)
class Watched:
    """What a machine knows of one of its clients beside its score. `said`: what the server is told. `warnings`: in
    which the client is named, for the card of its model."""

    said: dict[str, Json] = field(default_factory=dict)
    warnings: list[Warned] = field(default_factory=list)


def measured(
    built: Experiment, sites: Mapping[str, Site | Exception], personal: Personal, split: str, *, examples: bool = False
) -> dict[str, Measured | Exception]:
    """By client that has the split its `Measured`, or why there is none."""
    requested = {
        name: site for name, site in sites.items() if isinstance(site, Exception) or site.data.queries.get(split)
    }
    limit = built.config.eval.limit
    return fused(
        built.runtime, requested, lambda site: measure(personal, site, split, built.metric, limit, each=examples)
    )


def told_scores(
    built: Experiment, sites: Iterable[str], found: Mapping[str, Measured | Exception]
) -> dict[str, dict[str, Json] | Exception]:
    """What the server is told of the scores; with privacy on no loss, as of training."""
    private = built.config.privacy.clip is not None

    def told(client: str, outcome: Measured) -> dict[str, Json]:
        if math.isnan(outcome.score):
            return {"score": None}
        return {"score": outcome.score} if private else _as_json(outcome)

    nothing: dict[str, dict[str, Json] | Exception] = {name: {"score": None} for name in sites}
    return nothing | each(found, told)


def _as_json(found: Measured) -> dict[str, Json]:
    """What was measured, as a `Reply` reads it."""
    scored: dict[str, Json] = {"score": found.score}
    scored |= {"beside": dict(found.beside)} if found.beside else {}
    loss = found.loss
    return scored if loss is None else {**scored, "loss": rounded(loss) if math.isfinite(loss) else None}


def watched(built: Experiment, clients: Iterable[str], found: Mapping[str, Measured | Exception]) -> dict[str, Watched]:
    """By client of this machine what its scores and those of single examples say; with privacy on nothing."""
    result = {id: Watched() for id in clients}
    known = {id: its for id, its in found.items() if isinstance(its, Measured)}
    if built.config.privacy.clip is not None or not known:
        return result
    base = _of_base(built, known)
    rules = {id: rule for id in known if (rule := rule_of(built.clients[id], built.metric, built.config.eval.limit))}
    own, references = _scores(known), {"base": _scores(base), "rule": _scores(rules)}
    counts = {id: len(its.examples) for id, its in known.items()}
    warnings = warnings_of(own, references, counts, parts=_parts(built, len(built.clients)))
    for id in known:
        said: dict[str, Json] = {"tested": counts[id]}
        said |= {"rule": rules[id].name, "rule_score": rules[id].score} if id in rules else {}
        said |= {"of_base": _as_json(base[id])} if id in base else {}
        its = [warned for warned in warnings if id in warned["figures"]]
        said |= {"warnings": {warned["kind"]: warned["figures"][id] for warned in its}} if its else {}
        result[id] = Watched(said, its)
    return result


def heard(
    experiment: Experiment, run: Run, scores: Mapping[str, float], replies: Mapping[str, Reply]
) -> dict[str, Any]:
    """What summary.json says of the rules, the base and of warnings, from what the clients say; see `watch`."""
    facts: dict[str, Any] = {}
    rules = {client: BestRule(*reply.rule) for client, reply in replies.items() if reply.rule}
    if line := line_of(experiment.metric, rules):
        facts["rule"] = line
        run.log(line)
    if summary := summary_of(experiment.metric, {id: reply.of_base for id, reply in replies.items()}):
        facts["base"] = {"kind": "score", "round": 0, "split": "test", **summary.as_json()}
        run.log(facts["base"])
    why = [PRIVATE] if experiment.config.privacy.clip is not None else []
    local, how = local_scores(run)
    counts = {id: reply.tested for id, reply in replies.items()}
    warnings = believed({id: reply.warned for id, reply in replies.items()}, replies.keys())
    warnings += warnings_of(Scores(scores), {"local": local} if local else {}, counts, losses=losses_of(run))
    return facts | keep(run, warnings, [*why, *how])


def _scores(found: Mapping[str, Measured] | Mapping[str, BestRule]) -> Scores:
    return Scores({id: its.score for id, its in found.items()}, {id: its.examples for id, its in found.items()})


def _of_base(built: Experiment, known: Mapping[str, Measured]) -> dict[str, Measured]:
    if built.config.eval.base is not True or not built.base.knows:
        return {}
    bare, state = built.untrained()
    states = dict.fromkeys(bare, state)
    found = measured(built, {id: bare[id] for id in known}, states, "test", examples=True)
    return {id: its for id, its in found.items() if isinstance(its, Measured)}


def _parts(built: Experiment, here: int) -> int:
    """Into how many machines the run is divided, if all have as many clients."""
    clients = built.config.network.clients
    total = clients if isinstance(clients, int) else len(clients)
    return -(-max(total, here) // max(1, here))
