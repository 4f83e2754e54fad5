"""Losses of a method's own for adapters: functions of logits, targets and columns, in the fused pass.

Shape letters: n targets of a client in a micro-batch, C classes or words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.method.requests import Fit

PLACE = "example"  # the column that each fit has: the place of a target's example among those of the fit


def names_of(jobs: Sequence[Fit]) -> tuple[str, ...]:
    """The columns that the functions of these fits are given; empty where none has a function.

    Raises:
        UserError: examples differ in their further columns.
    """
    if not any(callable(job.loss) for job in jobs):
        return ()
    found = {tuple(getattr(example, "extra", {})) for job in jobs for example in job.examples}
    if len(found) > 1:
        several = " and ".join(sorted(", ".join(names) or "none" for names in found))
        raise UserError(
            f"examples that train together have different further columns ({several}), so no loss can read them; give "
            "every file the columns of task.columns.extra"
        )
    return (PLACE, *next(iter(found), ()))


def columns_of(examples: Sequence[Any], places: Sequence[int]) -> Tensor:
    """(examples, numbers) float64, in the order of `names_of`."""
    rows = [
        [float(place), *map(float, getattr(example, "extra", {}).values())]
        for place, example in zip(places, examples, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def own_losses(jobs: Sequence[Fit], names: Sequence[str], logits: Tensor, laid: Any) -> Tensor:
    """The losses (targets of all clients,): each client's function is given its own targets alone.

    Args:
        logits: (targets, C).
        laid: the micro-batch (`fit.Laid`), on the device of the logits.

    Raises:
        UserError: a function returned something else than a number for each target.
    """
    labels, losses = laid.batch.labels.to(logits.device), logits.new_zeros(len(logits))
    by_target = laid.columns[laid.batch.rows.to(laid.columns.device)].to(logits)
    for k in dict.fromkeys(laid.owners):
        own, loss = (laid.owner == k).nonzero().flatten().to(logits.device), jobs[k].loss
        mine, targets = logits[own], labels[own]
        if not callable(loss):
            losses = losses.index_put((own,), nn.functional.cross_entropy(mine, targets, reduction="none"))
            continue
        columns = dict(zip(names, by_target[own].unbind(1), strict=True))
        columns[PLACE] = columns[PLACE].long()
        found = loss(mine, targets, columns)
        if not isinstance(found, Tensor) or found.shape != targets.shape:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UserError(
                f"client {jobs[k].site}: loss=FUNCTION returned {what} for {len(targets)} targets; it takes logits "
                "(n, C), targets (n,) and columns, and returns a loss (n,) for each target"
            )
        losses = losses.index_put((own,), found)
    return losses
