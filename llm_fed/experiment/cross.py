"""The cross table: the personal model of each client on the examples of each other one, in a run and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError
from llm_fed.basics.names import rounded
from llm_fed.basics.rng import generator
from llm_fed.eval.warning import Cross, Examples
from llm_fed.method.requests import succeeded
from llm_fed.scoring.evaluation import measure
from llm_fed.state import State

if TYPE_CHECKING:
    from llm_fed.bench.build import Experiment

MOST_CLIENTS = 8  # of more, `auto` takes a sample: the work grows with the square of their number
MOST_EXAMPLES = 50  # of a client that `auto` asks; an interval hardly needs more


@dataclass(frozen=True)
class CrossPlan:
    """Which cross table a run makes."""

    clients: tuple[str, ...] = ()  # in the table; empty where there is none
    sizes: Mapping[str, int] = field(default_factory=dict)  # how many examples each of them has there
    of: int = 0  # how many clients could have been in it
    limit: int | None = None  # most examples of a client; None: all
    why: str = ""  # why there is none, in words; may be empty

    @property
    def answers(self) -> int:
        """How many, beside those of the test, which are the diagonal."""
        return (len(self.clients) - 1) * sum(self.sizes[id] for id in self.clients) if self.clients else 0

    def describe(self) -> str:
        if not self.clients:
            return f"none: {self.why}" if self.why else ""
        n = len(self.clients)
        sample = f" (a sample of {self.of}; eval.cross=true takes all)" if n < self.of else ""
        each = f" of at most {self.limit}" if self.limit else ""
        return (
            f"{n} models on the test examples{each} of {n} clients{sample}: {n * n - n} evaluations beside the test, "
            f"with {self.answers:,} answers"
        )


def planned(built: Experiment, split: str = "test") -> CrossPlan:
    """The cross table that `eval.cross` asks for; UserError where it is requested (`true`), and cannot be made."""
    config = built.config
    requested = config.eval.cross
    counts = {id: len(site.data.queries.get(split, ())) for id, site in built.scored.items()}
    sizes = {id: min(count, config.eval.limit or count) for id, count in counts.items()}
    clients = [id for id, size in sizes.items() if size]
    if requested is False:
        return CrossPlan(why="eval.cross is false")
    if len(clients) < 2:
        if requested is True:
            raise UserError(
                f"eval.cross=true (--cross) needs at least two clients with {split} examples, and {len(clients)} of "
                f"{len(sizes)} has them; give them some, as task.validation does for validation, or leave it out"
            )
        return CrossPlan(why=f"it needs two clients with {split} examples")
    if config.privacy.by_example:
        return CrossPlan(why="with privacy.unit=example no model is tried on the examples of other clients")
    if built.method.one_model:
        return CrossPlan(why="all clients have the same model")
    first = built.scored[clients[0]].structure
    if any(built.scored[id].structure != first for id in clients):
        return CrossPlan(why="the clients' models differ in their kind or rank")
    if requested is True:
        return CrossPlan(tuple(clients), sizes, len(clients))
    sizes = {id: min(size, MOST_EXAMPLES) for id, size in sizes.items()}
    limit = MOST_EXAMPLES if any(size == MOST_EXAMPLES for size in sizes.values()) else None
    drawn = torch.randperm(len(clients), generator=generator(config.evaluation_seed, "cross table"))[:MOST_CLIENTS]
    chosen = sorted(drawn.tolist()) if len(clients) > MOST_CLIENTS else range(len(clients))
    return CrossPlan(tuple(clients[index] for index in chosen), sizes, len(clients), limit)


def scored(
    built: Experiment, plan: CrossPlan, states: Mapping[str, State], own: Examples, base: Examples, split: str = "test"
) -> Cross:
    """The table, as scores of single examples. `states`: the personal model of each client of the plan. `own` and
    `base`: by client the scores of its own model and of the base, on its first examples, as far as these are known."""
    answers: dict[tuple[str, str], Sequence[float]] = {}
    for owner in plan.clients:
        known = {owner} if len(own.get(owner, ())) >= plan.sizes[owner] else set()
        personal = dict.fromkeys(plan.clients, states[owner])
        work = {
            id: measure(personal, built.scored[id], split, built.metric, plan.sizes[id], each=True, loss=False)
            for id in plan.clients
            if id not in known
        }
        for id, outcome in succeeded(built.runtime.run(work)).items():
            answers[owner, id] = outcome.examples or (outcome.score,)
        for id in known:
            answers[owner, id] = own[id][: plan.sizes[id]]
    known_base = {id: base[id][: plan.sizes[id]] for id in plan.clients if len(base.get(id, ())) >= plan.sizes[id]}
    return Cross(answers, known_base)


def as_json(built: Experiment, plan: CrossPlan, cross: Cross, split: str = "test") -> dict[str, Json]:
    """What cross.json holds: a row per client's model and a column per client whose examples it answers."""

    def mean(scores: Sequence[float] | None) -> float | None:
        return rounded(fmean(scores)) if scores else None

    clients, base = plan.clients, [mean(cross.base.get(id)) for id in plan.clients]
    rows = [[mean(cross.answers.get((owner, id))) for id in clients] for owner in clients]
    table: dict[str, Json] = {"metric": built.metric, "split": split, "clients": [*clients], "scores": rows}
    table |= {"limit": plan.limit or built.config.eval.limit}
    table |= {"base": base} if any(score is not None for score in base) else {}
    return table | ({"of": plan.of} if len(clients) < plan.of else {})
