"""The cross table of a finished run: the personal model of each client on the examples of each other one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.basics.files import write_result
from llm_fed.commands.evaluate import reopen, scoring_config
from llm_fed.eval.report import write_anew
from llm_fed.eval.warning import Scores, warnings_of
from llm_fed.experiment import cross
from llm_fed.experiment.baselines import read_examples
from llm_fed.runs.folder import CROSS
from llm_fed.runs.reading import finished
from llm_fed.runs.tracking import Reporter


def cross_scores(
    folder: Path, *, split: str = "test", settings: Sequence[str] = (), keep: bool = True
) -> dict[str, Any]:
    """Score the personal model of every client on the `split` of every client, write the table to `cross.json` in the
    run folder, and its report anew; how much work that is, a note says first. Returns `clients`, and `scores` (0-100):
    a row per client's model, a column per client whose examples it answers; and `metric`, `split`, `limit` and
    `warnings`. Clients without such examples are in none of these, but are named as `unscored`. UserError: as
    `evaluate_run`; or there is no such table, see `cross.planned`. RunError: the disk is full, or the folder cannot be
    written. `keep`: whether table and report are written."""
    reporter = Reporter()
    config = scoring_config(folder, split, settings, reporter)
    config = replace(config, eval=replace(config.eval, cross=True))
    experiment, states = reopen(folder, config, settings, reporter)
    plan = cross.planned(experiment, split)
    if not plan.clients:
        raise UserError(f"{folder} has no cross table: {plan.why}; leave --cross out")
    n, examples = len(plan.clients), sum(plan.sizes.values())
    reporter.note(
        f"{n} models on the examples of {n} clients are {n * n} evaluations with {n * examples} answers; --limit N "
        "takes at most N examples of each client"
    )
    metric = finished(folder)["scores"].get("metric")  # of the run's own test
    same_rows = all(word.startswith(("eval.limit=", "eval.metric=")) for word in settings)
    alike = split == "test" and experiment.metric == metric and same_rows
    found = cross.scored(experiment, plan, states, {}, read_examples(folder).get("base", {}) if alike else {}, split)
    table = cross.as_json(experiment, plan, found, split)
    table["warnings"] = warnings_of(Scores({}), {}, {}, found)
    if unscored := [id for id, size in plan.sizes.items() if not size]:
        table["unscored"] = unscored
    if not keep:
        return table
    write_result(folder / CROSS, json.dumps(table, ensure_ascii=False).encode())
    write_anew(folder, CROSS)
    return table
