"""Warnings: what is wrong with a run, or with one of its personal models, as far as an interval shows it.

Each kind of warning is one question about every client. All intervals of a run are so wide that at most one run in
twenty warns where nothing is wrong: `ALARM` is shared by the kinds, and within a kind by its comparisons (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import TypedDict

import numpy as np

from llm_fed.basics.names import rounded
from llm_fed.eval.intervals import Estimate, between, mean_of, of_means, paired, slope

ALARM = 0.05  # the probability of any warning where nothing is wrong, at most
LEAST_EXAMPLES = 5  # of a client, below which nothing is claimed
LEAST_ROUNDS = 8  # with a loss, below which no trend is claimed
FALLS = 0.9  # the level of the interval that says whether the mean loss falls
NAMED = 5  # clients of a warning that its text names

KINDS = {
    "below-base": "worse than the base without any adapter",
    "below-rule": "worse than the best rule, which trains nothing",
    "below-local": "worse than the model that the client trains alone (local)",
    "loss-rises": "the loss rises while the mean over the clients falls",
    "another-model": "another client's model answers better than its own",
    "gains-elsewhere": "the model has learned more of another client's examples than of its own",
}
REFERENCES = ("base", "rule", "local")

Examples = Mapping[str, Sequence[float]]  # by client the score of each of its examples, 0-100
Figures = Mapping[str, float | str]  # of one client, as `_detail` tells them


class Warned(TypedDict):
    """A warning as summary.json has it."""

    kind: str  # of KINDS
    clients: list[str]
    text: str
    figures: dict[str, Figures]


@dataclass(frozen=True)
class Scores:
    """Scores (0-100) by client, each on the client's own test examples."""

    means: Mapping[str, float]
    examples: Examples = field(default_factory=dict)  # as far as they are known


@dataclass(frozen=True)
class Cross:
    """The scores of models on the examples of other clients. `answers`: by (whose model, whose examples) the score of
    each example, on the diagonal, too. `base`: of the same examples without any adapter; empty where it is not known.
    """

    answers: Mapping[tuple[str, str], Sequence[float]]
    base: Examples = field(default_factory=dict)

    @property
    def clients(self) -> list[str]:
        return [model for model, client in self.answers if model == client]

    @cached_property
    def columns(self) -> dict[str, tuple[int, np.ndarray]]:
        """By client how many models answered its examples, and the sum of their scores of each example."""
        found: dict[str, tuple[int, np.ndarray]] = {}
        for (_, client), scores in self.answers.items():
            count, total = found.get(client, (0, np.zeros(len(scores))))
            found[client] = count + 1, total + np.asarray(scores)
        return found

    def others(self, client: str) -> list[str]:
        """Those whose models answered this client's examples, and whose examples this one's model answered."""
        return [k for k in self.clients if k != client and {(k, client), (client, k)} <= self.answers.keys()]


def warnings_of(
    own: Scores,
    references: Mapping[str, Scores],
    counts: Mapping[str, int],
    cross: Cross | None = None,
    losses: Mapping[str, Mapping[int, float]] | None = None,
    parts: int = 1,
) -> list[Warned]:
    """All warnings of a run.

    Args:
        own: of the personal models.
        references: those of REFERENCES that are known.
        counts: the test examples of each client.
        losses: by client its loss by round.
        parts: into how many such parts a run is divided, each of which looks at its own clients alone.
    """
    found: dict[str, dict[str, Figures]] = {}
    for name in REFERENCES:
        if name in references:
            found[f"below-{name}"] = dict(below(own, references[name], name, counts, parts))
    found["loss-rises"] = dict(rising(losses or {}))
    if cross:
        found["another-model"] = dict(another_model(cross, parts))
        found["gains-elsewhere"] = dict(gains_elsewhere(cross, parts))
    return [warning(kind, figures) for kind, figures in found.items() if figures]


def warning(kind: str, figures: Mapping[str, Figures]) -> Warned:
    """One warning about the clients in `figures`."""
    details = [f"{client} ({_detail(kind, its)})" for client, its in list(figures.items())[:NAMED]]
    more = f"; and {len(figures) - NAMED} more clients" if len(figures) > NAMED else ""
    text = f"{KINDS[kind]}: {'; '.join(details)}{more}"
    return {"kind": kind, "clients": [*figures], "text": text, "figures": dict(figures)}


def sentences(warnings: Sequence[Warned], client: str) -> list[str]:
    """What the warnings say of one client, for the card of its model."""
    its = [(warned["kind"], warned["figures"][client]) for warned in warnings if client in warned["figures"]]
    return [f"{KINDS[kind].capitalize()}: {_detail(kind, figures)}." for kind, figures in its]


def below(
    own: Scores, reference: Scores, name: str, counts: Mapping[str, int], parts: int = 1
) -> Iterator[tuple[str, Figures]]:
    """The clients whose personal model is worse than the reference, with figures."""
    both = [client for client in own.means if client in reference.means and counts.get(client, 0) >= LEAST_EXAMPLES]
    level = level_of(len(both) * parts)
    for client in both:
        first, second = own.examples.get(client, ()), reference.examples.get(client, ())
        if first and len(first) == len(second):
            estimate = paired(first, second)
        else:
            estimate = of_means(own.means[client], reference.means[client], counts[client])
        if estimate.interval(level)[1] < 0:
            scores = rounded({"score": own.means[client], name: reference.means[client]})
            yield client, {**scores, **estimate.figures(level), "examples": counts[client]}


def rising(losses: Mapping[str, Mapping[int, float]]) -> Iterator[tuple[str, Figures]]:
    """The clients whose loss rises in the second half of its rounds, while the mean over the clients falls."""
    halves = {client: half for client, its in losses.items() if (half := _second_half(its))}
    if len(halves) < 2:
        return
    everywhere = sorted(set.intersection(*map(set, halves.values())))
    # Where each round asks others, a mean by round compares other clients with each other.
    together = len(everywhere) > 2
    slopes = [slope([*half], [*half.values()]) for half in halves.values()]
    means = [fmean(half[round] for half in halves.values()) for round in everywhere]
    trend = slope(everywhere, means) if together else mean_of([each.value for each in slopes])
    # Where training has converged, the mean falls or rises by chance, and some loss always rises.
    if (trend.interval(FALLS)[1] if together else trend.value) >= 0:
        return
    level = level_of(len(halves))
    for (client, half), estimate in zip(halves.items(), slopes, strict=True):
        if estimate.interval(level)[0] > 0:
            yield client, {**estimate.figures(level), "mean": rounded(trend.value), "rounds": len(half)}


def another_model(cross: Cross, parts: int = 1) -> Iterator[tuple[str, Figures]]:
    """The clients on whose examples another client's model is better than their own; with the best of these."""
    pairs = [(client, other) for client in _enough(cross) for other in cross.clients
             if other != client and (other, client) in cross.answers]  # fmt: skip
    compared = {
        (client, other): [paired(cross.answers[other, client], cross.answers[client, client])]
        for client, other in pairs
    }
    for client, other, figures in _best(compared, parts):
        means = {"own": fmean(cross.answers[client, client]), "other": fmean(cross.answers[other, client])}
        yield client, {"model": other, **rounded(means), **figures, "examples": len(cross.answers[client, client])}


def gains_elsewhere(cross: Cross, parts: int = 1) -> Iterator[tuple[str, Figures]]:
    """The clients whose model gains more on another client's examples than on its own.

    A gain over the base differs with the examples: where the base knows nothing every model gains much. So the model
    must also be further above the other clients' models there than it is on its own examples; that alone decides where
    the base is not known.
    """
    pairs = [(client, other) for client in _enough(cross) for other in cross.others(client)
             if len(cross.answers[other, other]) >= LEAST_EXAMPLES]  # fmt: skip
    compared = {}
    for client, other in pairs:
        over = (_edge, _gain) if {client, other} <= cross.base.keys() else (_edge,)
        compared[client, other] = [between(of(cross, client, other), of(cross, client, client)) for of in over]
    for client, other, figures in _best(compared, parts):
        of, name = (_gain, "base") if {client, other} <= cross.base.keys() else (_edge, "other models")
        gains = {"own": of(cross, client, client).value, "elsewhere": of(cross, client, other).value}
        yield client, {"examples_of": other, **rounded(gains), **figures, "over": name}


def _best(
    compared: Mapping[tuple[str, str], Sequence[Estimate]], parts: int
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """By client the other one of which all differences are shown to be above 0 and the last is the largest, with it."""
    level = level_of(len(compared) * parts)
    shown = {pair: found[-1] for pair, found in compared.items() if all(it.interval(level)[0] > 0 for it in found)}
    for client in dict.fromkeys(client for client, _ in shown):
        its = {other: estimate for (own, other), estimate in shown.items() if own == client}
        best = max(its, key=lambda other: its[other].value)
        yield client, best, its[best].figures(level)


def level_of(comparisons: int) -> float:
    """The level of each interval of a kind. A warning looks at one of its ends."""
    return 1 - 2 * ALARM / len(KINDS) / max(1, comparisons)


def _enough(cross: Cross) -> list[str]:
    return [client for client in cross.clients if len(cross.answers[client, client]) >= LEAST_EXAMPLES]


def _gain(cross: Cross, model: str, client: str) -> Estimate:
    """Over the base."""
    return paired(cross.answers[model, client], cross.base[client])


def _edge(cross: Cross, model: str, client: str) -> Estimate:
    """How far a model is above the mean of the other clients' models on a client's examples."""
    (count, total), own = cross.columns[client], np.asarray(cross.answers[model, client])
    return mean_of((own - (total - own) / (count - 1)).tolist())


def _second_half(losses: Mapping[int, float]) -> dict[int, float]:
    """The later rounds; empty where a trend could not be told from noise."""
    known = {round: loss for round, loss in sorted(losses.items()) if loss is not None and math.isfinite(loss)}
    return dict([*known.items()][len(known) // 2 :]) if len(known) >= LEAST_ROUNDS else {}


def _detail(kind: str, its: Figures) -> str:
    level = f", {100 * float(its['level']):.6g} % interval" if "level" in its else ""  # a node need not tell it
    if kind == "loss-rises":
        interval = f"[{its['low']:.3g}, {its['high']:.3g}{level}]"
        return f"{its['difference']:+.2g} {interval} in each round, the mean {its['mean']:+.2g}"
    interval = f"difference {its['difference']:.1f} [{its['low']:.1f}, {its['high']:.1f}{level}]"
    if kind == "another-model":
        return f"{its['own']:.1f} with its own, {its['other']:.1f} with that of {its['model']}, {interval}"
    if kind == "gains-elsewhere":
        where = f"{its['own']:.1f} above the {its['over']} on its own examples"
        return f"{where}, {its['elsewhere']:.1f} on those of {its['examples_of']}, {interval}"
    name = kind.removeprefix("below-")
    return f"{its['score']:.1f} against {its[name]:.1f}, {interval} over {its['examples']} examples"
