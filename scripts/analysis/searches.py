"""What the analysis scripts read of a run of Feddle: the search of each checkpoint's round, and work at the server."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.federation.progress import restore
from llm_fed.merge.atlas import normalized
from llm_fed.methods.feddle import Feddle
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.state import State


def searches(run: Path, built: build.Experiment) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each checkpoint's round, and the server's state after it.

    Raises:
        UserError: the server had not searched by then.
    """
    checkpoints = Checkpoints(run / "checkpoints")
    for round in checkpoints.rounds():
        state = restore(checkpoints.load(round), built.clients, built.server).state
        if not (isinstance(built.method, Feddle) and state["search"]):
            raise UserError(f"{run} had not searched by round {round}; give a run of Feddle")
        yield round, state


def before_search(built: build.Experiment, state: dict[str, Any]) -> tuple[State, Tensor]:
    """The model that the round's search started from without the fallback, and the normalised anchors (M, P)."""
    assert isinstance(built.method, Feddle)  # as in `searches`
    atlas, _ = normalized(state["anchors"], built.method.normalize)
    coefficients, model = torch.tensor(state["search"]["coefficients"]).to(atlas), state["model"]
    return model.like(model.row - coefficients @ atlas), atlas


def at_server(built: build.Experiment, work: Coroutine[Any, Any, Any]) -> Any:
    """What the work returns; its exception is raised."""
    (outcome,) = built.runtime.run({built.server.id: work}).values()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
