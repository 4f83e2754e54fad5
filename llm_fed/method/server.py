"""Server: the site that sees uploads, and perhaps examples of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llm_fed.basics.errors import UserError
from llm_fed.merge import mean, robust
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.settings.config import ServerStepConfig
from llm_fed.state import State


@dataclass
class Server(Site):
    """The server, as a method's server code sees it."""

    clients: tuple[str, ...] = ()  # who is registered
    cohort: int = 0  # the most clients that are asked in one round
    structures: Mapping[str, Structure] = field(default_factory=dict)  # of clients, where ranks differ
    step: ServerStepConfig = ServerStepConfig()  # how it takes means
    unmoved: list[str] = field(default_factory=list)  # why a mean of this round was none

    def begin(self, round: int, lr: float) -> None:
        super().begin(round, lr)
        self.unmoved = []

    def need_examples(self, method: str, *, foreign: bool = False) -> None:
        """Refuse a server without examples on which the method could train. UserError: it has none, or, unless
        `foreign` ones will do, those of another task."""
        if not self.train:
            raise UserError(
                f"{method} trains on the server's own examples, but the server has none; set task.server.examples"
            )
        if self.data.foreign and not foreign:
            raise UserError(f"{method} needs server examples of the clients' own task; leave task.server.name out")

    def average(self, updates: Sequence[State], weights: Sequence[float] | None = None) -> State:
        """The mean of the clients' updates by the rule `server.aggregation`. If there are too few
        updates for the rule, it is zero, and the round's metrics say so.

        Args:
            weights: the weight of each update (default: equal weights).
        """
        if self.step.aggregation == "mean":
            return mean(updates, weights)
        if not self.enough(len(updates)):
            return 0.0 * updates[0]
        share = robust.shares([1.0] * len(updates) if weights is None else weights, self.step.liars)
        return robust.aggregate(updates, share[None], self.step)[0]

    def enough(self, uploads: int) -> bool:
        """Whether these are enough uploads for the rule `server.aggregation`. If not, the round's
        metrics say so."""
        if why := robust.lacking(uploads, self.step):
            self.unmoved.append(why)
        return not why
