"""What the analysis scripts read of finished runs: their scores, their metrics, and what personal models make of test
pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_fed.basics.errors import UserError
from llm_fed.bench.build import Experiment
from llm_fed.commands.evaluate import reopen
from llm_fed.kinds.images import Images
from llm_fed.models.joined import Answer
from llm_fed.models.structure import Full
from llm_fed.runs.reading import finished, read_config
from llm_fed.state import State
from llm_fed.tasks.common import Picture


def told_apart(runs: Sequence[Path]) -> dict[str, Path]:
    """Finished runs by their methods' names, or by their folders' where a method is there twice.

    Raises:
        UserError: a folder is no finished run, or is there twice.
    """
    for run in runs:
        finished(run)
    methods = [read_config(run).method["name"] for run in runs]
    for names in (methods, [run.resolve().name for run in runs], list(map(str, runs))):
        if len(set(names)) == len(runs):
            return dict(zip(names, runs, strict=True))
    raise UserError(f"{', '.join(map(str, runs))}: a run is given twice; give each once")


@dataclass(frozen=True)
class Scored:
    """Some of a client's test pictures, and what its personal model makes of them."""

    pictures: Sequence[Picture]
    answer: Answer
    state: State
    models: tuple[str, ...]  # names of those that stand side by side


def whole(run: Path) -> tuple[Experiment, Images, dict[str, State]]:
    """A finished run of whole image models: its experiment, the models' base, and what it exported of each who is
    scored.

    Raises:
        UserError: the run is not finished, or is one of adapters.
    """
    config = read_config(run)
    if config.adapter is not None:
        raise UserError(f"{run} trained adapters; give a run of whole image models, with adapter: null")
    built, states = reopen(run, config)
    assert isinstance(built.base, Images)  # only image models train whole
    return built, built.base, states


def tested(run: Path, limit: int | None = None) -> tuple[dict[str, Scored], tuple[str, ...]]:
    """Everybody who is scored in a finished run of whole image models, and the names of the classes.

    Args:
        limit: at most so many pictures of each.

    Raises:
        UserError: the run is not finished, is one of adapters, or has no test pictures.
    """
    built, base, states = whole(run)
    pictures = {
        id: site.data.queries["test"][:limit] for id, site in built.scored.items() if site.data.queries.get("test")
    }
    if not pictures:
        raise UserError(f"{run}: no client has test pictures, so there is nothing to show")
    outcomes = built.runtime.run({id: built.scored[id].answers(states[id], own) for id, own in pictures.items()})
    scored = {}
    for id, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            raise outcome
        structure = built.scored[id].structure
        assert isinstance(structure, Full)  # without an adapter
        scored[id] = Scored(pictures[id], outcome, states[id], tuple(name for name, _ in structure.parts))
    return scored, base.labels
