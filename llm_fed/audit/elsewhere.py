"""Trains again in another environment than the run's, where nothing is equal to the last bit: from round 0 and from
each kept checkpoint to the next one, and compares where that leads, and the scores of each checkpoint, within
tolerances. docs/audit.md has the measurements behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from llm_fed.audit.again import score_line
from llm_fed.audit.findings import Audit
from llm_fed.audit.replay import Replay
from llm_fed.runs.checkpoint import Saved
from llm_fed.runs.records import comparable
from llm_fed.settings.config import Config
from llm_fed.state import State
from llm_fed.state.outline import leaves
from llm_fed.state.wire import Message


@dataclass(frozen=True)
class Tolerances:
    """Up to where a difference is rounding."""

    way: float  # how far from a kept state, as a share of the way that led to it
    rounds: int  # between two checkpoints: differences grow from round to round, and beyond this nothing is said
    loss: float  # how far a client's loss under a kept state may be off, as a share of it


ADAPTERS = Tolerances(way=0.01, rounds=10, loss=0.005)
SIXTEEN_BITS = Tolerances(way=0.3, rounds=10, loss=0.05)  # adapters of a base that computes in bfloat16 or float16
# Some entries of whole models (a bias before BatchNorm) have a gradient of nothing but rounding, which Adam makes as
# long as any other.
WHOLE_MODELS = Tolerances(way=0.2, rounds=3, loss=0.005)
# By how many points the mean score may differ, or by one example's worth: texts tip where two words are equally likely.
POINTS = 2.0
FLOOR = 1e-6  # what float32 itself leaves open of a state's norm, where the way to it was short


def compare(replay: Replay, kept: Mapping[int, Saved], since: int, report: Audit) -> None:
    """Train from round 0 and from each kept checkpoint to the next one, as far as they are later than `since`, the last
    round that was trained on other data than there are now; score what is kept."""
    config = replay.experiment.config
    limits = _limits(config)
    for start, end in pairwise(round for round in sorted({0, *kept}) if round >= since):
        if end - start > limits.rounds:
            report.unchecked.append(
                f"rounds {start + 1} to {end}: the checkpoints lie more than {limits.rounds} rounds apart"
            )
            continue
        replay.restore(kept[start]) if start else replay.begin()
        before = {name: _numbers(value) for name, value in _held(replay).items()}
        for _ in range(start, end):
            replay.next(report)
        after = _held(replay)
        replay.restore(kept[end])
        worst = _compare_held(before, after, _held(replay), (start, end), limits.way, report)
        report.drift[f"{start}-{end}"] = worst
        report.checked.append(
            f"rounds {start + 1} to {end}, trained again: they end within {worst:.2g} of the distance that the run went"
        )
    for round in (round for round in kept if round > since):
        replay.restore(kept[round])
        if (known := score_line(comparable(replay.lines), round, config.eval.during)) is not None:
            _compare_scores(replay, known, report)


def _limits(config: Config) -> Tolerances:
    if config.adapter is None:
        return WHOLE_MODELS
    return ADAPTERS if config.base.dtype == "float32" else SIXTEEN_BITS


def _held(replay: Replay) -> dict[str, Message]:
    """By name the server's state, and what each client remembers."""
    e = replay.experiment
    return {"server": replay.progress.state} | {id: dict(sorted(site.memory.items())) for id, site in e.clients.items()}


def _compare_held(
    before: Mapping[str, Tensor],
    after: Mapping[str, Message],
    kept: Mapping[str, Message],
    rounds: tuple[int, int],
    tolerance: float,
    report: Audit,
) -> float:
    """Find whoever is not where the run has left it; the greatest distance, as a share of the way that was gone."""
    worst = 0.0
    for name in kept:
        now, then = _numbers(after[name]), _numbers(kept[name])
        off = float((now - then).norm()) if now.numel() == then.numel() else math.inf
        was = before[name] if before[name].numel() == then.numel() else 0.0  # it remembered nothing yet
        way = float((then - was).norm())
        share = off / way if way else math.inf if off else 0.0
        worst = max(worst, share)
        if off > tolerance * way + FLOOR * float(then.norm()):
            kind = "server step" if name == "server" else "memory"
            what = f"trained again from round {rounds[0]}, it ends {share:.2g} of the distance away"
            report.find(rounds[1], name, kind, f"{what}; up to {tolerance:g} is rounding")
    return worst


def _numbers(message: Message) -> Tensor:
    """All floating numbers of a message in one row, as float64."""
    rows = [torch.zeros(0)]
    for _, leaf in leaves(message):
        if isinstance(leaf, State):
            rows += [leaf.row, *leaf.extras.values()]
        elif isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            rows.append(torch.as_tensor(leaf))
    return torch.cat([row.detach().double().reshape(-1).cpu() for row in rows])


def _compare_scores(replay: Replay, known: Mapping[str, Any], report: Audit) -> None:
    """The scores of a kept checkpoint: the losses of each client, and the mean score."""
    split, tolerance = known["split"], _limits(replay.experiment.config).loss
    if (scores := replay.scores(split)) is None:
        return
    for client, loss in scores.losses.items():
        then = known["losses"].get(client)
        if None not in (loss, then) and not math.isclose(loss, then, rel_tol=tolerance):  # type: ignore[arg-type]
            report.find(replay.round, client, "scores", f"its {split} loss is {then} and should be about {loss:.6g}")
    limit, sites = replay.experiment.config.eval.limit, replay.experiment.scored.values()
    requested = [len(site.data.queries[split][:limit]) for site in sites if site.data.queries.get(split)]
    allowed = max(POINTS, 100 / min(requested) / len(requested))
    if abs(scores.mean - known["mean"]) > allowed or scores.clients.keys() != known["clients"].keys():
        what = f"the mean {split} score is {known['mean']:g} and should be about {scores.mean:g}"
        report.find(replay.round, "", "scores", what)
