"""The report of a run: one self-contained HTML file made from the run's folder."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from llm_fed.basics.errors import RunError, listed
from llm_fed.eval import merges
from llm_fed.eval.report.clients import anything_sent, client_table, curves
from llm_fed.eval.report.page import write_page
from llm_fed.eval.report.pictures import pictures_of
from llm_fed.eval.report.reading import Line, read_config, read_object, reference, usage, was_cut
from llm_fed.runs.folder import CROSS, ENDED, SAMPLES, WARNINGS
from llm_fed.runs.reading import scores_in_training
from llm_fed.runs.records import comparable, read_records
from llm_fed.scoring.rules import describe as rules_in_words
from llm_fed.scoring.scores import NOT_SCORED, not_defined, reads_texts

KINDS = ("client", "round", "score", "after", "rule", "event", "drop-out", "server", "merge", "privacy", "clients")
ALONE = "the base alone"


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into the run's folder, finished or not, and returns its path.

    Reads config.yaml, and as far as they are there the other files of the run, whose last lines may be half-written;
    for comparison the scores of a run of `local` beside it. UserError where `run_dir` is no run's folder, or a file in
    it is damaged; RunError where the disk is full, or the folder cannot be written.
    """
    run_dir = Path(run_dir).resolve()
    path = run_dir / "report.html"
    try:
        return write_page(path, "run.html.jinja", **_values(run_dir))
    except OSError as error:  # of the temporary files in which pictures are drawn, too
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _values(run_dir: Path) -> Line:
    facts, config_text = read_config(run_dir)
    lines, timing = (read_records(run_dir / name) for name in ("metrics.jsonl", "timing.jsonl"))
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in KINDS}
    since, during = comparable(lines), facts.pop("during")
    curve, final = scores_of(since, during)
    shown = final or (curve[-1] if curve else None)
    alone, rule = (baseline(since, kind, shown) for kind in ("score", "rule"))
    local = reference(run_dir)
    references = {ALONE: curve[0]["mean"]} if curve and curve[0]["round"] == 0 else {}
    references |= {"local": local[during]} if during in local else {}
    drawn, curved = curves(by_kind, curve)
    name = run_dir.name
    return dict(
        run=name,
        early=read_object(run_dir / ENDED),  # before its last round
        **facts,
        config_text=config_text,
        command=shlex.join(["llm-fed", "run", f"{name}/config.yaml", "--out", f"{name}-again"]),
        cut=was_cut(run_dir / "metrics.jsonl"),
        anew=next((line for line in since if line["kind"] == "search anew"), None),
        done=max((line["round"] for line in by_kind["round"]), default=0),
        shown=shown,
        alone=alone,
        rule=rule,
        rules=rules_in_words(rule) if rule else "",
        text=shown is not None and reads_texts(shown["metric"]),
        local=local.get(shown["split"]) if shown else None,
        final=bool(final),
        table=client_table(by_kind, shown, alone, rule),
        sent=anything_sent(by_kind["client"]),
        apart=_apart(by_kind["clients"], shown),
        curves=drawn,
        curved=curved,
        totals=_totals(by_kind["round"]),
        privacy=by_kind["privacy"][-1] if by_kind["privacy"] else None,
        seconds=sum(line["seconds"] for line in timing),
        parts=_parts(timing),
        ended=next((line["ended"] for line in reversed(timing) if "ended" in line), None),
        environment=read_object(run_dir / "environment.json"),
        events=_events(by_kind["event"]),
        parents=by_kind["merge"][0]["rounds"] if by_kind["merge"] else {},
        merges=merges.tabulate({x["client"]: x for x in by_kind["merge"]}) if by_kind["merge"] else [],
        pictures=pictures_of(by_kind, curve, final, references),
        samples=_samples(read_records(run_dir / SAMPLES)),
        network=(run_dir / "network.json").exists(),
        usage=usage(run_dir),
        cross=read_object(run_dir / CROSS),
        **warned(run_dir),
    )


def _samples(lines: Sequence[Line]) -> Line:
    """The sample predictions by client; the templates around their prompts; and the system text that all share."""
    clients: dict[str, list[Line]] = {}
    for line in lines:
        whole = {"text": str(line["prompt"]), "template": "{prompt}", "system": "", "base": None}
        clients.setdefault(line["client"], []).append(whole | line)
    samples = [line for own in clients.values() for line in own]
    templates = dict.fromkeys(line["template"] for line in samples if line["template"].strip() not in ("", "{prompt}"))
    systems = {line["system"] for line in samples}
    return {"clients": clients, "templates": [*templates], "system": systems.pop() if len(systems) == 1 else ""}


def warned(run_dir: Path) -> Line:
    """The warnings of a finished run, those of a cross table that was made later, too, and what was not looked at."""
    known, cross = read_object(run_dir / WARNINGS), read_object(run_dir / CROSS)
    warnings = known.get("warnings", [])
    later = [each for each in cross.get("warnings", ()) if each not in warnings]
    return {"warnings": [*warnings, *later], "unchecked": known.get("unchecked", [])}


def scores_of(lines: Sequence[Line], during: str) -> tuple[list[Line], Line | None]:
    """The scores of the split that is scored `during` training, one per round, and the final test score."""
    curve = list(scores_in_training(lines, during).values())
    tested = [line for line in lines if (line["kind"], line.get("split")) == ("score", "test") and line["round"]]
    final = [line for line in tested if not any(line is point for point in curve)]
    return curve, final[-1] if final else None


def _apart(lines: Sequence[Line], shown: Line | None) -> list[str]:
    """A sentence for each kind of client that does not train, or is not scored."""
    line, shown = lines[-1] if lines else {}, shown or {}
    undefined = shown.get("undefined", ())
    named = {
        NOT_SCORED.replace("-", "–", 1): [id for id in shown.get("unscored", ()) if id not in undefined],
        "Some clients have no training example and are only scored, with the model for all.": line.get("only_tested"),
        "Some clients have no training example and are left out.": line.get("left_out"),
    }
    said = [f"{sentence} These are {listed(names)}." for sentence, names in named.items() if names]
    return said + ([not_defined(shown["metric"], undefined)] if undefined else [])


def baseline(lines: Sequence[Line], kind: str, shown: Line | None) -> Line | None:
    """On the split that is shown the line of the base (`score`), or of the rules; None where it is not known."""
    wanted = (kind, 0, shown["split"]) if shown else None
    matching = (line for line in lines if wanted == (line["kind"], line.get("round"), line.get("split")))
    return next((line for line in matching if line is not shown), None)


def _totals(rounds: list[Line]) -> Line:
    names = ("asked", "arrived", "refused", "failed", "dropped_out", "bytes_up", "bytes_down")
    sums: Line = {name: sum(line.get(name, 0) for line in rounds) for name in names}
    return sums | {"padding": fmean(line["padding"] for line in rounds) if rounds else None}


def _parts(timing: list[Line]) -> Sequence[tuple[str, float]]:
    """(part of a round, seconds over all rounds), the longest first."""
    seconds: Counter[str] = Counter()
    for line in timing:
        seconds.update(line["parts"])
    return seconds.most_common()


def _events(events: Sequence[Line]) -> list[Line]:
    """Equal events of a client as one row with its rounds, in order of first appearance."""
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for line in events:
        rounds.setdefault((line["event"], line.get("client", ""), line.get("reason", "")), []).append(line["round"])
    return [
        {"event": event, "client": client, "reason": reason, "rounds": _few(numbers)}
        for (event, client, reason), numbers in rounds.items()
    ]


def _few(numbers: list[int]) -> str:
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    return f"{len(numbers)} times, from {min(numbers)} to {max(numbers)}"
