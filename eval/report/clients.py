"""The table of a run's clients, and the curve of each by round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llm_fed.basics.documents import Json
from llm_fed.bench.costs import EMPTY
from llm_fed.eval.report.page import number
from llm_fed.eval.report.reading import Line
from llm_fed.scoring.scores import METRICS

_TOTALS = {"mean": "mean", "std over clients": "std", "worst half": "worst_half"}
MOST_CURVES = 400  # clients in one report whose curves can be chosen
MOST_ROWS = 200  # without the script


@dataclass(frozen=True)
class Heading:
    title: str
    kind: Literal["bar", "score", "loss", "count", "bytes"]  # how its numbers are written, see `page.cell`
    wide: bool = False  # left out on a narrow screen


@dataclass(frozen=True)
class SortableTable:
    """A table that the script sorts and searches; without it, its first rows."""

    first: str  # the title of the column of names
    columns: Sequence[Heading]
    rows: Sequence[tuple[str, Sequence[float | None]]]  # name, and a number per column
    totals: Sequence[tuple[str, Sequence[str]]] = ()  # name, and a text per column

    @property
    def shown(self) -> Sequence[tuple[str, Sequence[float | None]]]:
        return self.rows[:MOST_ROWS]

    @property
    def data(self) -> dict[str, Json]:
        columns: list[Json] = [[column.title, column.kind, column.wide] for column in self.columns]
        rows: list[Json] = [[name, *map(_finite, values)] for name, values in self.rows]
        return {"columns": columns, "rows": rows}


def client_table(
    by_kind: Mapping[str, Sequence[Line]], shown: Line | None, alone: Line | None, rule: Line | None
) -> SortableTable:
    """One row per client. What nobody has, as the rounds of a merge, has no column; nor have bytes where nothing was
    sent. `shown`: the scores that are shown; None: there are none yet. `alone`, `rule`: those of the base, and of the
    best rules that train nothing, on the same split."""
    everybody = [*shown["clients"], *shown.get("unscored", ())] if shown else []
    work: dict[str, list[Line]] = {client: [] for client in everybody}
    for line in by_kind["client"]:
        work.setdefault(line["client"], []).append(line)
    trained = {client: lines for client, lines in work.items() if lines}
    beside = shown.get("beside", {}) if shown else {}
    silent = Counter(line["client"] for line in by_kind["drop-out"])
    failures = Counter(line.get("client") for line in by_kind["event"])
    known = [(Heading(shown["metric"] if shown else "score", "bar"), shown["clients"] if shown else {})]
    known += [(Heading(title, "score"), line["clients"]) for title, line in (("base", alone), ("rule", rule)) if line]
    known += [(Heading(f"{shown['split']} loss", "loss", True), shown["losses"])] if shown else []
    known += [(Heading(name, "score" if name in METRICS else "loss"), of["clients"]) for name, of in beside.items()]
    known += [
        (Heading("training loss", "loss", True), {client: _last_loss(lines) for client, lines in work.items()}),
        (Heading("rounds", "count", True), {client: len(lines) for client, lines in trained.items()}),
        (Heading("examples", "count", True), {client: lines[-1]["examples"] for client, lines in trained.items()}),
    ]
    for title, key in (("up", "bytes_up"), ("down", "bytes_down")) if anything_sent(by_kind["client"]) else ():
        sums = {client: sum(line[key] for line in lines) for client, lines in work.items()}
        known.append((Heading(title, "bytes", True), sums))
    known += [(Heading("dropped out", "count", True), {id: silent[id] for id in work})] if silent else []
    known.append((Heading("failures", "count", True), {id: failures[id] for id in work}))
    kept = known[:1] + [(column, of) for column, of in known[1:] if any(of.get(id) is not None for id in work)]
    columns = [column for column, _ in kept]
    rows = [(client, [of.get(client) for _, of in kept]) for client in work]
    return SortableTable("client", columns, rows, _totals(columns, shown, [line for line in (alone, rule) if line]))


def _last_loss(lines: Sequence[Line]) -> float | None:
    return next((line["loss"] for line in reversed(lines) if line.get("loss") is not None), None)


def anything_sent(lines: Iterable[Line]) -> bool:
    """Whether one of these lines of clients is of a message that is not empty."""
    return any(max(line["bytes_up"], line["bytes_down"]) > EMPTY for line in lines)


def _totals(columns: Sequence[Heading], shown: Line | None, baselines: Sequence[Line]) -> list[tuple[str, list[str]]]:
    if shown is None or len(shown["clients"]) < 2:
        return []
    rows = {name: [number(line[key]) for line in (shown, *baselines)] for name, key in _TOTALS.items()}
    if shown["losses"]:
        rows["mean"].append(number(shown["loss"], 3))
        beside = shown.get("beside", {})
        rows["mean"] += [number(of["mean"], 1 if name in METRICS else 3) for name, of in beside.items()]
    return [(name, [*cells, *[""] * (len(columns) - len(cells))]) for name, cells in rows.items()]


def curves(by_kind: Mapping[str, Sequence[Line]], scored: Sequence[Line]) -> tuple[dict[str, Json], int]:
    """For the script, of the first MOST_CURVES clients: the training losses and the scores (of the `scored` lines),
    each as [rounds, values]; and how many clients have a curve."""
    by_client: dict[str, dict[str, tuple[list[int], list[float]]]] = {}

    def add(client: str, what: str, round: int, value: float | None) -> None:
        if (value := _finite(value)) is not None:
            rounds, values = by_client.setdefault(client, {}).setdefault(what, ([], []))
            rounds.append(round)
            values.append(float(f"{value:.4g}"))

    for line in scored:
        for client, score in line["clients"].items():
            add(client, "score", line["round"], score)
    for line in by_kind["client"]:
        add(line["client"], "loss", line["round"], line.get("loss"))
    what = f"{scored[-1]['metric']}, {scored[-1]['split']}" if scored else ""
    return {"score": what, "clients": dict([*by_client.items()][:MOST_CURVES])}, len(by_client)


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers."""
    return None if value is None or not math.isfinite(value) else value
