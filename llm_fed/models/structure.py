"""What clients train: LoRA adapters around a frozen base (`Lora`), or whole image models (`Full`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

from llm_fed.basics.errors import UserError
from llm_fed.models import ranks
from llm_fed.models.lora import Lora
from llm_fed.settings.config import AdapterConfig


@dataclass(frozen=True)
class GateShape:
    """What may vary of a gate (`models.gate`)."""

    hidden: int = 32  # m, neurons of its first linear layer
    last_norm: bool = True  # whether batch normalisation is its last step before the softmax


@dataclass(frozen=True)
class Full:
    """Every parameter is an entry of the state; floating buffers are its extras.

    One image model, or several side by side, whose entries begin with their names. `answer` says how these classify
    together (`models.joined`).
    """

    parts: tuple[tuple[str, str], ...] = (("", ""),)  # (name, architecture): no name where it is alone, and the run's
    # base where there is no architecture
    answer: str = ""
    gate: GateShape = GateShape()  # where the answer is `gate`

    @property
    def plain(self) -> bool:
        """Whether it is one model."""
        return not self.answer

    def beside(self, own: str, shared: str, answer: str) -> Full:
        """This model under the name `own`, and the run's base, which all clients know, under the name `shared`."""
        ((_, architecture),) = self.parts
        return Full(((own, architecture), (shared, "")), answer, self.gate)

    def several(self, *names: str, answer: str) -> Full:
        """So many models like this one."""
        ((_, architecture),) = self.parts
        return Full(tuple((name, architecture) for name in names), answer)

    def with_experts(self, *names: str, gate: str) -> NoReturn:
        """Raises UserError: only adapters can stand side by side in every layer."""
        raise UserError("this method gives clients several experts, which are LoRA adapters; set adapter.rank")

    def only(self, expert: str) -> NoReturn:
        """Raises UserError: there are no experts."""
        raise UserError(f"a whole model has no expert {expert!r}; set adapter.rank")


Structure = Lora | Full


def structure_of(
    adapter: AdapterConfig | None, head: str = "", architecture: str = "", rank: int | None = None
) -> Structure:
    """The structure that a configuration describes.

    Args:
        head: name of the module that is trained whole beside the adapters; empty: none.
        architecture: of a whole model that is not the run's base.
        rank: of the client's adapter (default: the largest that a client has).

    Raises:
        UserError: a value cannot be an adapter's.
    """
    if adapter is None:
        return Full((("", architecture),))
    one = replace(adapter, rank=ranks.largest(adapter) if rank is None else rank)
    return Lora.from_config(one, whole=(head,) if head else ())
