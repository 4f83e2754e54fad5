"""Clients on other machines: the server's side, the nodes' side, and Flower as the carrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_fed.network.trainer import TrainerNode


def patch(trainer: Any) -> TrainerNode:
    """A node whose client trains with this Trainer; `.serve(home)` answers a server until nobody asks any more.
    `trainer`: a `transformers.Trainer`, or one that derives from it, around a PEFT model with one LoRA adapter.
    UserError: it trains something else than that adapter, or in a way that cannot begin anew in each round."""
    from llm_fed.network.trainer import TrainerNode  # with torch, which nothing else here needs so early

    return TrainerNode(trainer)
