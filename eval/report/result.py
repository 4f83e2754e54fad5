"""A finished run as a cell of a notebook shows it: its scores beside those of base and rule, a curve, a few answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_fed.eval.distribution import FEW
from llm_fed.eval.report.page import rendered
from llm_fed.eval.report.pictures import curve_of
from llm_fed.eval.report.reading import Line, read_config
from llm_fed.eval.report.run import KINDS, baseline, scores_of
from llm_fed.eval.report.samples import samples_of
from llm_fed.runs.folder import SAMPLES
from llm_fed.runs.reading import comparable
from llm_fed.runs.records import read_records

ANSWERS = 3  # samples that are shown


def result_html(folder: Path) -> str:
    """HTML that stands alone and needs no style sheet or script, which notebooks drop. UserError where `folder` is no
    run's folder, or a file in it is damaged."""
    facts, _ = read_config(folder / "config.yaml")
    lines = read_records(folder / "metrics.jsonl")
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in KINDS}
    since = comparable(lines)
    curve, final = scores_of(since, facts["during"])
    shown = final or (curve[-1] if curve else None)
    baselines = {title: baseline(since, kind, shown) for title, kind in (("base", "score"), ("rule", "rule"))}
    columns = {title: line for title, line in baselines.items() if line}
    columns |= {facts["method"]: shown} if shown else {}
    picture = curve_of(by_kind, curve, final)
    return rendered(
        "result.html.jinja",
        **facts,
        name=folder.name,
        shown=shown,
        columns=columns,
        clients=list(shown["clients"]) if shown and len(shown["clients"]) <= FEW else [],
        picture=picture and picture.embedded(),
        answers=_answers(read_records(folder / SAMPLES)),
    )


def _answers(lines: list[Line]) -> list[dict[str, Any]]:
    """One of each of the first clients, or of fewer clients further ones."""
    clients = samples_of(lines).clients
    most = max((len(own.lines) for own in clients), default=0)
    answers = [own.lines[number] for number in range(most) for own in clients if number < len(own.lines)]
    return list(answers[:ANSWERS])
