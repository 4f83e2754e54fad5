"""Client: a site whose data never leave it, and whose examples may be hidden by noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm_fed.basics.errors import UserError
from llm_fed.method.requests import PerExample
from llm_fed.method.site import Site
from llm_fed.state import State

NOISY_STEPS = "noisy steps"  # key of `memory`: how many a private client took


@dataclass
class Client(Site):
    """One client, as a method's client code sees it."""

    # How its examples are hidden (`federation/privacy.py`), with a secret of all batches and noise: who must not know
    # the examples must not know it.
    private: PerExample | None = None
    alone: float = 0.0  # the rounds whose steps it takes by itself after the last that it trains with others

    @property
    def own_steps(self) -> int:
        """The optimizer steps of these rounds; at least one where there are any."""
        return max(1, round(self.alone * self.local.steps_on(self.num_examples))) if self.alone else 0

    def expect(self, drawn: State) -> None:
        """Take the layout of another site's state as this site's: `assemble` then need not draw one to compare."""
        if not drawn.extras:
            self._layout = drawn.layout

    def indices(self, count: int, steps: int | None = None, nth: int = 0, epochs: int | None = None) -> list[list[int]]:
        """As `Site.indices`. With `private` each example is drawn independently with the probability that gives the
        batch size on average (Poisson sampling), so batches differ in size and may be empty."""
        if self.private is None:
            return super().indices(count, steps, nth, epochs)
        size, total = self._steps(count, steps, epochs)
        draws = self.private.secret.of("batches", self._stage, self.round, self.id, nth)
        each = (draws.uniforms(count, step) <= size / count for step in range(total))
        return [taken.nonzero().flatten().tolist() for taken in each]

    def _noise(self, count: int, steps: int, nth: int) -> PerExample | None:
        """The noise for a fit on `count` examples. Its steps are counted in `memory`, from which `privacy.spent_by`
        computes epsilon."""
        if self.private is None:
            return None
        size, before = min(self.local.batch_size, count), self.memory.get(NOISY_STEPS, {"rate": 0.0, "steps": 0})
        self.memory[NOISY_STEPS] = {"rate": max(before["rate"], size / count), "steps": before["steps"] + steps}
        secret = self.private.secret.of("noise of examples", self._stage, self.round, self.id, nth)
        return replace(self.private, size=size, secret=secret)

    @property
    def _stage(self) -> str:
        """Of a longer run, the number of what follows the last round may be a round's."""
        return "finish" if self._finishes else "round"

    def _look(self, verb: str) -> None:
        """Call this before examples are used but for noisy steps. UserError: their privacy would not be kept."""
        if self.private is not None:
            raise UserError(
                f"privacy.unit=example only protects examples in training steps, but this method also uses them in "
                f"client.{verb}; choose another method, or privacy.unit=client"
            )
