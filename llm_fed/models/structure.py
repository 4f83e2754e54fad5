"""What a client trains, and the questions that methods, engines and exports ask it: LoRA adapters around a frozen base
(`lora.Lora`), or whole image models (`Full`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
        """What clients train. `ranks`: those that they have, where they differ."""

    def over_frozen(self) -> Structure:
        """This structure with frozen weights beneath its adapters, if it has adapters."""
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
        """This model as `own`, and the run's base, which all clients know, as `shared`; UserError for adapters."""
        raise UserError("this method gives each client a second, whole model; set adapter=null")

    def _needs_adapters(self, lack: str) -> NoReturn:
        raise UserError(f"the method needs LoRA adapters, and a whole model {lack}; set adapter.rank")


@dataclass(frozen=True)
class GateShape:
    """What may vary of a gate (`models.joined`)."""

    hidden: int = 32  # m, neurons of its first linear layer
    last_norm: bool = True  # whether batch normalisation is its last step before the softmax


@dataclass(frozen=True)
class Full(Structure):
    """Every parameter is an entry of the state; floating buffers are its extras.

    One image model, or several side by side, whose entries begin with their names. `answer` says how these classify
    together (`models.joined`).
    """

    fused: ClassVar[bool] = False

    parts: tuple[tuple[str, str], ...] = (("", ""),)
    answer: str = ""
    gate: GateShape = GateShape()  # where the answer is `gate`

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Raises UserError: only adapters have one."""
        self._needs_adapters("has no rank")

    @property
    def plain(self) -> bool:
        """Whether it is one model."""
        return not self.answer

    def beside(self, own: str, shared: str, answer: str) -> Full:
        ((_, architecture),) = self.parts
        return Full(((own, architecture), (shared, "")), answer, self.gate)

    def mixture(self, *names: str) -> Full:
        ((_, architecture),) = self.parts
        return Full(tuple((name, architecture) for name in names), "probabilities")

    def gated(self, own: str, shared: str) -> Full:
        return self.beside(own, shared, "gate")

    def describe(self, ranks: Sequence[int] = ()) -> str:
        if self.plain:
            return "a whole model"
        names = [name for name, _ in self.parts]
        return f"{len(names)} whole models side by side ({', '.join(names)})"
