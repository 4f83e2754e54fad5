"""What clients train: LoRA adapters around a frozen base (`Lora`), or the whole model (`Full`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from llm_fed.config import AdapterConfig
from llm_fed.errors import UserError
from llm_fed.lora import Lora


@dataclass(frozen=True)
class Full:
    """Every parameter of the model is an entry of the state; its floating buffers are the state's extras."""

    plain = True

    def with_experts(self, *names: str, gate: str) -> NoReturn:
        """Raises UserError: only adapters can stand side by side."""
        raise UserError("this method gives clients several experts, which are LoRA adapters; set adapter.rank")

    def only(self, expert: str) -> NoReturn:
        """Raises UserError: there are no experts."""
        raise UserError(f"a whole model has no expert {expert!r}; set adapter.rank")


Structure = Lora | Full


def structure_of(adapter: AdapterConfig | None, head: str = "") -> Structure:
    """The structure that a configuration describes.

    Args:
        head: name of the module that is trained whole beside the adapters; empty: none.

    Raises:
        UserError: a value cannot be an adapter's.
    """
    return Full() if adapter is None else Lora.from_config(adapter, whole=(head,) if head else ())
