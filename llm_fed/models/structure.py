"""What clients train: LoRA adapters around a frozen base (`Lora`), or whole image models (`Full`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from llm_fed.models import ranks
from llm_fed.models.lora import Lora
from llm_fed.models.trained import Structure as Structure
from llm_fed.settings.config import AdapterConfig


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

    def several(self, *names: str, answer: str) -> Full:
        ((_, architecture),) = self.parts
        return Full(tuple((name, architecture) for name in names), answer)

    def mixture(self, *names: str) -> Full:
        return self.several(*names, answer="probabilities")

    def gated(self, own: str, shared: str) -> Full:
        return self.beside(own, shared, "gate")

    def describe(self, ranks: Sequence[int] = ()) -> str:
        if self.plain:
            return "a whole model"
        names = [name for name, _ in self.parts]
        return f"{len(names)} whole models side by side ({', '.join(names)})"


def structure_of(
    adapter: AdapterConfig | None, heads: tuple[str, ...] = (), architecture: str = "", rank: int | None = None
) -> Structure:
    """The structure that a configuration describes.

    Args:
        heads: names of the modules that are trained whole beside the adapters.
        architecture: of a whole model that is not the run's base.
        rank: of the client's adapter (default: the largest that a client has).

    Raises:
        UserError: a value cannot be an adapter's.
    """
    if adapter is None:
        return Full((("", architecture),))
    one = replace(adapter, rank=ranks.largest(adapter) if rank is None else rank)
    return Lora.from_config(one, whole=heads)
