"""What a run says of itself at its end: warnings, with the scores that they rest on, and what was not looked at."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from llm_fed.basics import signs
from llm_fed.basics.names import rounded
from llm_fed.bench.build import Experiment
from llm_fed.eval.report.reading import local_beside
from llm_fed.eval.warning import KINDS, LEAST_ROUNDS, Cross, Examples, Scores, Warned, warning, warnings_of
from llm_fed.experiment import cross
from llm_fed.experiment.baselines import read_examples
from llm_fed.runs.folder import CROSS, EXAMPLES, WARNINGS, Run
from llm_fed.runs.reading import scores_in_training
from llm_fed.runs.records import comparable, read_object
from llm_fed.scoring.scores import Summary
from llm_fed.state import State

_FIGURES = (
    "score", "base", "rule", "own", "other", "elsewhere", "difference", "low", "high", "level", "examples",
    "model", "examples_of", "over",
)  # fmt: skip
_LARGEST = 1e6
NO_LOCAL = (
    "no run of local on the same data lies beside this one, so nobody knows who loses by sharing; "
    "llm-fed run RUN/config.yaml method=local --out RUN-local trains one (RUN is this run's folder), and "
    "llm-fed compare --runs RUN RUN-local compares the two; of objects llm_fed.compare with methods=['local', ...] does"
)


def watch(
    experiment: Experiment,
    run: Run,
    personal: Mapping[str, State],
    summary: Summary | None,
    facts: Mapping[str, Any],
    examples: Mapping[str, Examples],
) -> dict[str, Any]:
    """What summary.json says under `warnings` and `unchecked`; writes these files of the run, and cross.json and
    test_scores.jsonl. RunError: the disk is full.

    Args:
        personal: the models that are tested, by client.
        summary: their scores, with those of single examples.
        facts, examples: of `Baselines.score`.
    """
    if summary is None:
        for name in (CROSS, EXAMPLES, WARNINGS):
            run.forget(name)
        return {}
    table, why = _table(experiment, run, personal, summary, examples.get("base", {}))
    _keep(experiment, run, summary, examples)
    local, how = local_scores(run)
    references = {name: Scores(facts[name]["clients"], examples.get(name, {})) for name in ("base", "rule")
                  if name in facts}  # fmt: skip
    references |= {"local": local} if local else {}
    limit = experiment.config.eval.limit
    counts = {id: len(site.data.queries.get("test", ())[:limit]) for id, site in experiment.scored.items()}
    warnings = warnings_of(Scores(summary.clients, summary.examples), references, counts, table, losses_of(run))
    return keep(run, warnings, [*why, *how])


def keep(run: Run, warnings: list[Warned], unchecked: list[str]) -> dict[str, Any]:
    """Say them, and write warnings.json, from which the report is made; the same for summary.json. They are not in
    metrics.jsonl, since they depend on which other runs lie beside this one."""
    for warned in warnings:
        run.say(f"warning: {warned['text']}")
    for text in unchecked:
        run.say(text)
    found = {"warnings": warnings} | ({"unchecked": unchecked} if unchecked else {})
    run.remember(WARNINGS, found)
    return found


def believed(said: Mapping[str, Mapping[str, Any]], names: Collection[str]) -> list[Warned]:
    """The warnings of clients on other machines; what could be none is left out. `said`: by client the figures of each
    kind. `names`: of all clients."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for client, kinds in said.items():
        for kind, figures in kinds.items():
            known = _figures(figures, names) if kind in KINDS and isinstance(figures, dict) else {}
            with suppress(KeyError, TypeError, ValueError):
                warning(kind, {client: known})  # which needs all of them
                found.setdefault(kind, {})[client] = known
    return [warning(kind, found[kind]) for kind in KINDS if kind in found]


def _figures(figures: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    def good(key: str, value: Any) -> bool:
        if key in ("model", "examples_of"):
            return isinstance(value, str) and value in names
        if key == "over":
            return value in ("base", "other models")
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST

    return {key: value for key, value in figures.items() if key in _FIGURES and good(key, value)}


def losses_of(run: Run) -> dict[str, dict[int, float]]:
    """By client its loss by round: of the examples that are scored in training, where enough rounds were, and otherwise
    of its own training."""
    lines = comparable(run.records())
    curve = scores_in_training(lines, run.config.eval.during)
    scored: dict[str, dict[int, float]] = {}
    for round, line in curve.items():
        for client, loss in line.get("losses", {}).items() if round else ():
            scored.setdefault(client, {})[round] = loss
    if sum(bool(round) for round in curve) >= LEAST_ROUNDS and scored:
        return scored
    trained: dict[str, dict[int, float]] = {}
    for line in lines:
        if line["kind"] == "client" and line.get("loss") is not None:
            trained.setdefault(line["client"], {})[line["round"]] = line["loss"]
    return trained


def local_scores(run: Run) -> tuple[Scores | None, list[str]]:
    """The scores of a run of `local` on the same data beside this one; without any a line on how to get them."""
    if run.config.method["name"] == "local":
        return None, []
    if (folder := local_beside(run.folder, alike=False)) is None:
        return None, [NO_LOCAL]
    summary = read_object(folder / "summary.json")  # which `local_beside` has read
    return Scores(summary["scores"].get("clients", {}), read_examples(folder).get("own", {})), []


def _table(
    experiment: Experiment, run: Run, personal: Mapping[str, State], summary: Summary, base: Examples
) -> tuple[Cross | None, list[str]]:
    """The cross table, which is written; without one why there is none, unless nobody wanted one."""
    plan = cross.planned(experiment)
    if not plan.clients:
        run.forget(CROSS)
        requested = experiment.config.eval.cross is not False and len(experiment.scored) > 1
        return None, [f"no cross table: {plan.why}"] if requested else []
    with signs.part(signs.CROSS):
        table = cross.scored(experiment, plan, personal, summary.examples, base)
    run.remember(CROSS, cross.as_json(experiment, plan, table))
    return table, []


def _keep(experiment: Experiment, run: Run, summary: Summary, examples: Mapping[str, Examples]) -> None:
    """Write the scores of single examples, a line per client, on which the intervals of other runs may rest; with
    `privacy.clip` nobody's are kept."""
    if experiment.config.privacy.clip is not None or not summary.examples:
        run.forget(EXAMPLES)
        return
    known = {"own": summary.examples, **examples}
    run.write_lines(EXAMPLES, (
        {"client": id, **{name: rounded(its[id]) for name, its in known.items() if id in its}}
        for id in summary.examples
    ))  # fmt: skip
