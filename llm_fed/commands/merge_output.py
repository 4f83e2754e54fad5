"""The output of `llm-fed merge` on runs as the folder of a finished run, which is scored, compared and chatted with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fed.basics import checksum, signs
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import write_file
from llm_fed.bench.build import Experiment
from llm_fed.runs.folder import CROSS, SPLITS
from llm_fed.runs.reading import HERE, config_text, saved_summary
from llm_fed.state import State
from llm_fed.tasks.record import Record

_FILES = ("config.yaml", "metrics.jsonl", SPLITS, "summary.json")  # the last one makes it a finished run


def check_place(out: Path) -> None:
    """Refuse to write over the files of a run.

    Raises:
        UserError: the folder is that of a run.
    """
    if (out / "checkpoints").exists():
        raise UserError(f"{out} is the folder of a run, whose files the merge would replace; give another --out")


def clear(out: Path) -> None:
    """Delete what an earlier merge has left of these files, before its adapters are replaced."""
    if out.is_dir() and scores_in(out) is not None:
        for name in (*reversed(_FILES), CROSS, "report.html"):
            (out / name).unlink(missing_ok=True)


def scores_in(out: Path) -> dict[str, Any] | None:
    """The test scores of a merge's output; None where it merged no runs."""
    try:
        done = saved_summary(out) or {}
    except UserError:  # of something else, or damaged
        return None
    return done["scores"] if done.get("adapters") == HERE else None


def write(
    experiment: Experiment,
    out: Path,
    states: Mapping[str, State],
    recipes: Mapping[str, Mapping[str, Any]],
    rounds: Mapping[str, int],
    known: Record | None,
) -> dict[str, Any]:
    """Score what was merged on the test examples, and write what makes `out` the folder of a finished run; its scores.

    Args:
        states: by client its merged model, which lies in `out/<client>`.
        recipes: by client what the merge found out.
        rounds: by name of a parent that is a run, which of its rounds was merged.
        known: the rows that the parents know, with their splits.

    Raises:
        UserError: a client has the name of such a file.
        RunError: the disk is full, or the folder cannot be written.
    """
    config = experiment.config
    with signs.part("test"):
        tested = [id for id, site in experiment.scored.items() if site.data.queries.get("test")]
        summary = experiment.score_states(states, "test") if set(tested) <= states.keys() else None
    scores = {"kind": "score", "round": config.rounds, "split": "test"} | (summary.as_json() if summary else {})
    done = {"round": config.rounds, "method": config.method["name"], "scores": scores, "adapters": HERE}
    lines = [{"kind": "merge", "client": id, "rounds": rounds, **recipe} for id, recipe in recipes.items()]
    objects = {"summary.json": done} | ({SPLITS: known.as_json()} if known else {})
    files = {name: json.dumps(checksum.added(value), ensure_ascii=False) for name, value in objects.items()}
    files["config.yaml"] = config_text(config)
    files["metrics.jsonl"] = "".join(
        json.dumps(line, ensure_ascii=False) + "\n" for line in [*lines, *([scores] if summary else [])]
    )
    for name in _FILES:
        if (out / name).is_dir():  # of a client of this name
            raise UserError(f"{out / name} is the model of a client, so the merge cannot be opened as a run")
        if name in files:
            try:
                write_file(out / name, files[name].encode())
            except OSError as error:
                raise RunError(f"cannot write {out / name}: {error.strerror or error}") from error
    return scores
