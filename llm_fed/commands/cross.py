"""The cross table of a finished run: the personal model of each client on the examples of each other one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import write_file
from llm_fed.commands.evaluate import reopen, scoring_config
from llm_fed.eval.report import write_report
from llm_fed.method.site import Site
from llm_fed.runs.folder import CROSS
from llm_fed.runs.tracking import Reporter
from llm_fed.state import State


def cross_scores(
    folder: Path,
    *,
    split: str = "test",
    metric: str | None = None,
    limit: int | None = None,
    settings: Sequence[str] = (),
    reporter: Reporter | None = None,
    keep: bool = True,
) -> dict[str, Any]:
    """Score the personal model of every client on the `split` of every client, write the table to `cross.json` in the
    run folder, and its report anew. Of n clients these are n^2 evaluations, which a note says first.

    Args:
        keep: whether table and report are written.

    Returns:
        `clients`, and `scores` (0-100): a row per client's model, a column per client whose examples it answers; and
        `metric`, `split` and `limit`. Clients without such examples are in none of these, but are named as `unscored`.

    Raises:
        UserError: as `evaluate_run`; or there are fewer than two clients, or their models differ in structure.
        RunError: the disk is full, or the folder cannot be written.
    """
    reporter = reporter or Reporter()
    config = scoring_config(folder, split=split, metric=metric, limit=limit, settings=settings, reporter=reporter)
    experiment, states = reopen(folder, config, settings, reporter)
    sizes = {id: len(site.data.queries.get(split, ())[: config.eval.limit]) for id, site in experiment.scored.items()}
    clients = [id for id, size in sizes.items() if size]
    if len(clients) < 2:
        raise UserError(
            f"--cross needs at least two clients with {split} examples, but the run has {len(clients)}; leave it out"
        )
    first = experiment.scored[clients[0]].structure
    if any(experiment.scored[id].structure != first for id in clients):
        raise UserError(
            "--cross needs the same kind of model at all clients, but base.clients or adapter.rank gives them "
            "different ones; leave it out"
        )
    examples = len(clients) * sum(sizes[id] for id in clients)
    reporter.note(
        f"{len(clients)} models on the examples of {len(clients)} clients are {len(clients) ** 2} evaluations with "
        f"{examples} answers; --limit N takes at most N examples of each client"
    )

    def under(owner: str) -> Any:
        async def personal(site: Site) -> State:
            return states[owner]

        return personal

    rows = []
    for id in clients:
        summary = experiment.score(under(id), split)
        assert summary is not None  # there are examples
        rows.append([summary.clients[other] for other in clients])
    table = {
        "metric": experiment.metric, "split": split, "limit": config.eval.limit, "clients": clients, "scores": rows,
    }  # fmt: skip
    if unscored := [id for id, size in sizes.items() if not size]:
        table["unscored"] = unscored
    if not keep:
        return table
    try:
        write_file(folder / CROSS, json.dumps(table, ensure_ascii=False).encode())
    except OSError as error:
        raise RunError(f"cannot write {folder / CROSS}: {error.strerror or error}") from error
    write_report(folder)
    return table
