"""Structure: what a client trains, and the questions that methods, engines and exports ask it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from llm_fed.basics.errors import UserError


class Structure(ABC):
    """LoRA adapters around a frozen base (`Lora`), or whole models (`Full`). Equal structures train together.

    Attributes:
        fused: whether all clients train in one pass; if not, they train one after another.
        whole: modules that are trained whole beside adapters, such as a classifier's head.
        rank: r, of adapters.
        delta: whether something frozen lies beneath the adapters, in a state's extras (`merge.delta`).
        parts: (name, architecture) of each model that a client has; no name for a single one, and no architecture for
            the run's base.
    """

    fused: ClassVar[bool]
    whole: tuple[str, ...] = ()
    rank: int
    delta: bool = False
    parts: tuple[tuple[str, str], ...] = (("", ""),)

    @property
    @abstractmethod
    def plain(self) -> bool:
        """Whether it is one adapter that stock PEFT knows, or one model."""

    @property
    def scaling(self) -> float:
        """s, of adapters."""
        self._needs_adapters("has no scaling")

    @abstractmethod
    def mixture(self, *names: str) -> Structure:
        """So many alike, of which weights that clients train say how much each counts."""

    @abstractmethod
    def gated(self, own: str, shared: str) -> Structure:
        """Two, of which a gate says for every example how much each counts: one is the client's own, the other has the
        form of the run's base."""

    @abstractmethod
    def describe(self, ranks: Sequence[int] = ()) -> str:
        """What clients train.

        Args:
            ranks: those that they have, where they differ.
        """

    def over_frozen(self) -> Structure:
        """The same with something frozen beneath the adapters, where there are adapters."""
        return self

    def of_rank(self, rank: int) -> Structure:
        """Adapters of another rank with the same scaling; UserError where there are none."""
        self._needs_adapters("has no rank")

    def doubled(self) -> Structure:
        """Adapters of twice the rank with the same scaling; UserError where there are none."""
        self._needs_adapters("cannot have twice the rank")

    def with_experts(self, *names: str, gate: str) -> Structure:
        """Several such adapters on each layer, combined by `gate`; UserError where there are none."""
        raise UserError("this method gives clients several experts, which are LoRA adapters; set adapter.rank")

    def only(self, expert: str) -> Structure:
        """One of the experts alone, under its name and without a gate; UserError where there are none."""
        self._needs_adapters(f"has no expert {expert!r}")

    def beside(self, own: str, shared: str, answer: str) -> Structure:
        """This model under the name `own`, and the run's base, which all clients know, under the name `shared`;
        UserError for adapters."""
        raise UserError("this method gives each client a second, whole model; set adapter=null")

    def several(self, *names: str, answer: str) -> Structure:
        """So many models like this one; UserError for adapters."""
        raise UserError("this method gives each client several whole models; set adapter=null")

    def _needs_adapters(self, lack: str) -> NoReturn:
        raise UserError(f"the method needs LoRA adapters, and a whole model {lack}; set adapter.rank")
