"""The table of a run's clients, and the curve of each by round."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llm_fed.bench.costs import EMPTY
from llm_fed.eval.report.page import cell
from llm_fed.eval.report.reading import Line
from llm_fed.scoring.scores import METRICS

_TOTALS = {"mean": "mean", "std over clients": "std", "worst half": "worst_half"}
MAX_BYTES = 2_000_000  # of curves in one report; clients beyond it have none


@dataclass(frozen=True)
class Column:
    title: str
    kind: Literal["bar", "score", "loss", "count", "bytes"]  # how its numbers are written, see `page.cell`
    wide: bool = False  # left out on a narrow screen


@dataclass(frozen=True)
class SortableTable:
    """A table that the script sorts and searches; without it, its first rows."""

    first: str  # the title of the column of names
    columns: Sequence[Column]
    rows: Sequence[tuple[str, Sequence[float | None]]]  # name, and a number per column
    alike: Sequence[str] = ()  # what all rows have alike, in words; it has no column
    totals: Sequence[tuple[str, Sequence[str]]] = field(default=())  # name, and a text per column

    @property
    def shown(self) -> Sequence[tuple[str, Sequence[float | None]]]:
        return self.rows[:200]

    @property
    def data(self) -> dict[str, Any]:
        columns = [[column.title, column.kind, column.wide] for column in self.columns]
        rows = [[name, *map(_finite, values)] for name, values in self.rows]
        return {"columns": columns, "rows": rows}


def client_table(
    by_kind: Mapping[str, Sequence[Line]], shown: Line | None, alone: Line | None, rule: Line | None
) -> SortableTable:
    """One row per client: its score and loss on the split that is shown (`shown`; None: no score yet), last training
    loss, rounds, examples, bytes, numbers of drop-outs and of events. Numbers that all clients have alike are in
    `alike`; bytes are nowhere if nothing was sent. `alone`, `rule`: the lines of the base, and of the best rules that
    train nothing, on the same split."""
    baselines = {title: line for title, line in (("base", alone), ("rule", rule)) if line}
    known = [*shown["clients"], *shown.get("unscored", ())] if shown else []
    work: dict[str, list[Line]] = {client: [] for client in known}
    for line in by_kind["client"]:
        work.setdefault(line["client"], []).append(line)
    trouble = Counter(line.get("client") for line in by_kind["event"])
    silent = Counter(line["client"] for line in by_kind["drop-out"])
    scores, losses = (shown["clients"], shown["losses"]) if shown else ({}, {})
    columns = [Column(shown["metric"] if shown else "score", "bar")]
    columns += [Column(title, "score") for title in baselines]
    columns += [Column(f"{shown['split']} loss", "loss", True)] if shown and losses else []
    beside = shown.get("beside", {}) if shown else {}  # what was measured beside the score
    columns += [Column(name, "score" if name in METRICS else "loss") for name in beside]
    columns += [
        Column("training loss", "loss", True),
        *(Column(title, "count", True) for title in ("rounds", "examples")),
    ]
    sent = anything_sent(by_kind["client"])
    columns += [Column("up", "bytes", True), Column("down", "bytes", True)] if sent else []
    columns += [Column("dropped out", "count", True)] if silent else []
    columns += [Column("failures", "count", True)]
    rows: list[tuple[str, Sequence[float | None]]] = []
    for client, lines in work.items():
        values = [scores.get(client)]
        values += [line["clients"].get(client) for line in baselines.values()]
        values += [losses.get(client)] if losses else []
        values += [of["clients"].get(client) for of in beside.values()]
        values += [next((line["loss"] for line in reversed(lines) if line.get("loss") is not None), None)]
        values += [len(lines), lines[-1]["examples"] if lines else None]
        values += [sum(line[key] for line in lines) for key in ("bytes_up", "bytes_down")] if sent else []
        values += [silent[client]] if silent else []
        rows.append((client, [*values, trouble[client]]))
    columns, kept, alike = _without_alike(columns, rows)
    return SortableTable("client", columns, kept, alike, _totals(columns, shown, baselines.values()))


def anything_sent(lines: Iterable[Line]) -> bool:
    """Whether any of these lines, with `bytes_up` and `bytes_down` of one message each, is of one that says
    something."""
    return any(max(line["bytes_up"], line["bytes_down"]) > EMPTY for line in lines)


def _without_alike(
    columns: Sequence[Column], rows: Sequence[tuple[str, Sequence[float | None]]]
) -> tuple[list[Column], list[tuple[str, Sequence[float | None]]], list[str]]:
    """The table without columns that are empty, and without counts that all of several rows share, which come in
    words."""
    kept, alike = [], []
    for number, column in enumerate(columns):
        distinct = {values[number] for _, values in rows}
        (value, *others) = distinct if distinct else (None,)
        if column.kind != "bar" and not others and value is None:
            continue  # nobody has one, as of a merge
        if len(rows) > 1 and column.kind in ("count", "bytes") and not others and value is not None:
            alike.append(f"{cell(value, column.kind)} {column.title if value != 1 else column.title.removesuffix('s')}")
        else:
            kept.append(number)
    return [columns[number] for number in kept], [(name, [own[number] for number in kept]) for name, own in rows], alike


def _totals(columns: Sequence[Column], shown: Line | None, baselines: Iterable[Line]) -> list[tuple[str, list[str]]]:
    if shown is None or len(shown["clients"]) < 2:
        return []
    lines = [shown, *baselines]
    rows = {name: [cell(line[key], "score") for line in lines] for name, key in _TOTALS.items()}
    if shown["losses"]:
        rows["mean"].append("–" if shown["loss"] is None else f"{shown['loss']:.3f}")
        rows["mean"] += [
            f"{of['mean']:.1f}" if name in METRICS else f"{of['mean']:.3f}"
            for name, of in shown.get("beside", {}).items()
        ]
    return [(name, [*cells, *[""] * (len(columns) - len(cells))]) for name, cells in rows.items()]


def curves(by_kind: Mapping[str, Sequence[Line]], scored: Sequence[Line]) -> tuple[dict[str, Any], int]:
    """For the script, by client: the training losses and the scores (of the `scored` lines), each as [rounds, values],
    of the first clients whose curves fit into MAX_BYTES; and how many clients have one."""
    by_client: dict[str, dict[str, list[list[float]]]] = {}

    def add(client: str, what: str, round: int, value: float | None) -> None:
        if (value := _finite(value)) is not None:
            rounds, values = by_client.setdefault(client, {}).setdefault(what, [[], []])
            rounds.append(round)
            values.append(float(f"{value:.4g}"))

    for line in scored:
        for client, score in line["clients"].items():
            add(client, "score", line["round"], score)
    for line in by_kind["client"]:
        add(line["client"], "loss", line["round"], line.get("loss"))
    left, kept = MAX_BYTES, {}
    for client, curve in by_client.items():
        left -= len(json.dumps([client, curve]))
        if left < 0:
            break
        kept[client] = curve
    what = f"{scored[-1]['metric']}, {scored[-1]['split']}" if scored else ""
    return {"score": what, "clients": kept}, len(by_client)


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers."""
    return None if value is None or not math.isfinite(value) else value
