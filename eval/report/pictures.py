"""The pictures of a run's report, each with what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llm_fed.eval import activity, merges, plots
from llm_fed.eval.report.clients import anything_sent
from llm_fed.eval.report.page import embed
from llm_fed.eval.report.reading import Line


@dataclass(frozen=True)
class ReportFigure:
    title: str
    alt: str
    about: str  # what it means
    draw: Callable[..., Path]

    def embedded(self) -> dict[str, str]:
        return {"title": self.title, "alt": self.alt, "about": self.about, "image": embed(self.draw)}


def pictures_of(
    by_kind: Mapping[str, Sequence[Line]], curve: Sequence[Line], final: Line | None, references: Mapping[str, float]
) -> list[dict[str, str]]:
    """Each picture for which there is data, as `ReportFigure.embedded`: of the score lines of the split that is scored
    during training (`curve`), the `final` test score, and scores on that split by label (`references`), drawn as lines.
    """
    shown = final or (curve[-1] if curve else None)
    figures = [_scores(curve, final, references, by_kind.get("after", ()))] if curve else []
    if by_kind["round"]:
        figures += [_losses(by_kind, curve)]
        figures += [_activity(updates)] if (updates := activity.updates_of(by_kind["round"])) else []
        figures += [_traffic(by_kind["round"])] if anything_sent(by_kind["client"]) else []
    if weights := merges.weights_after(by_kind["server"], shown["round"] if shown else None):
        figures.append(_weights(weights, shown))
    if coefficients := merges.coefficients(by_kind["server"]):
        figures.append(
            ReportFigure(
                "Merging coefficients by round",
                "median, quartiles and range of the merging coefficients by round, and the share of negative ones",
                "Each round the server searches a coefficient for every stored update, and merges the updates with "
                "them. A coefficient below zero takes back what an update had learned.",
                partial(plots.plot_spread, coefficients=coefficients),
            )
        )
    scores, chosen = merges.curves({line["client"]: line for line in by_kind["merge"]})
    if scores:
        figures.append(
            ReportFigure(
                "Score by merging weight",
                "validation score of each client by the federated adapter's weight",
                "At 0 a client has its local adapter alone, at 1 the federated one, and in between a mixture. The "
                "dashed line is the weight that the method chose: close to the curve's top, it chose well.",
                partial(plots.plot_mixing, curves=scores, chosen=chosen, metric=shown["metric"] if shown else "score"),
            )
        )
    return [picture.embedded() for picture in figures]


def _scores(
    curve: Sequence[Line], final: Line | None, references: Mapping[str, float], after: Sequence[Line] = ()
) -> ReportFigure:
    last = next((line for line in reversed(after) if line["split"] == curve[-1]["split"]), None)
    draw = partial(
        plots.plot_scores,
        rounds=[line["round"] for line in curve],
        mean=[line["mean"] for line in curve],
        worst_half=[line["worst_half"] for line in curve],
        metric=curve[-1]["metric"],
        split=curve[-1]["split"],
        test=(final["round"], final["mean"]) if final else None,
        references=references,
        after=(last["what"], last["mean"]) if last else None,
    )
    split, lines = curve[-1]["split"], " and ".join(references)
    about = f"Scores of the clients' personal models on their {split} examples, 0 to 100."
    if references:
        plain = {"the base alone": "the base without any adapter", "local": "clients that each train alone"}
        whom = " and ".join(plain[name] for name in references)
        about += f" The dotted line{'s are' if len(references) > 1 else ' is'} {whom}: a federation has to beat it."
    if last:
        about += (
            f" What follows the last round ({last['what']}) has a mark of its own; the test is of the models after it, "
            "so it is to be compared with that mark and not with the curve."
        )
    alt = f"{split} score: mean and worst half of the clients" + (f"; for comparison {lines}" if lines else "")
    return ReportFigure("Score by round", alt, about, draw)


def _losses(by_kind: Mapping[str, Sequence[Line]], curve: Sequence[Line]) -> ReportFigure:
    losses: dict[str, tuple[list[int], list[float]]] = {}
    for line in by_kind["client"]:
        client_rounds, client_losses = losses.setdefault(line["client"], ([], []))
        client_rounds.append(line["round"])
        client_losses.append(_value(line))
    rounds = by_kind["round"]
    mean = ([line["round"] for line in rounds], [_value(line) for line in rounds])
    known = [line for line in curve if line.get("loss") is not None]
    scored = ([line["round"] for line in known], [line["loss"] for line in known]) if known else None
    split = curve[-1]["split"] if curve else ""
    title, alt = "Training loss by round", "training loss of each client and their mean"
    about = "The mean loss of each client's local steps, and thick the mean over the clients."
    if scored:
        title, alt = f"Training and {split} loss by round", f"{alt}, and the mean {split} loss"
        about += f" Where the {split} loss rises while the training loss falls, clients learn their examples by heart."
    draw = partial(plots.plot_losses, clients=losses, mean=mean, scored=scored, split=split)
    return ReportFigure(title, alt, about, draw)


def _activity(updates: activity.Updates) -> ReportFigure:
    about = (
        "A column is a round, a row a client; grey: it was not in the round. Above, how its update points: the cosine "
        "with the mean of the others' updates. Below, how long it is: its norm over the round's median. A row that is "
        "unlike the others is a client that pulls elsewhere, or spoils the round."
    )
    if updates.left_out:
        count = updates.left_out + len(updates.clients)
        about += f" Of {count} clients those are shown whose direction differs most."
    alt = "direction and norm of each client's update by round"
    return ReportFigure("Updates of the clients by round", alt, about, partial(activity.draw, updates=updates))


def _traffic(rounds: Sequence[Line]) -> ReportFigure:
    up, down = ([line[name] for line in rounds] for name in ("bytes_up", "bytes_down"))
    draw = partial(plots.plot_bytes, rounds=[line["round"] for line in rounds], up=up, down=down)
    about = (
        "The serialised messages of all clients together. What they upload is above the axis, and what they are sent "
        "below."
    )
    return ReportFigure("Bytes by round", "bytes sent up and down in each round", about, draw)


def _weights(weights: Line, shown: Line | None) -> ReportFigure:
    groups = plots.clusters(weights["clients"])
    return ReportFigure(
        f"Merging weights of round {shown['round']}" if shown else "Merging weights",
        "heat map of merging weights: a row per client, a column per soup model",
        "A row shows of which of the server's models a client's personal model is merged, and in which shares. Clients "
        "with like rows share their models, so that they learn from each other; rows that are all alike mean one model "
        "for everybody.",
        partial(plots.plot_weights, clients=weights["clients"], values=weights["values"], groups=groups),
    )


def _value(line: Line) -> float:
    """A line's loss; NaN leaves a gap in a curve where nobody trained."""
    loss = line.get("loss")
    return math.nan if loss is None else loss
