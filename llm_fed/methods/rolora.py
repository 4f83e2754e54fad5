"""RoLoRA: Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA (Chen, Guo, Ju, Dalal, Zhu, Khisti;
NeurIPS 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server, Site, State, Upload, mean_update
from llm_fed.state import FACTORS

A, B = FACTORS


@dataclass(frozen=True)
class RoLoRA(Method):
    """A and B are trained and averaged in alternating rounds while the other is frozen, so that B A is averaged
    exactly.

    B is first, since A has no gradient while B is zero. Clients send the factor that they trained, half of an adapter.
    An image model's head is trained and averaged in every round.
    A late answer moves the factor that it trained.
    Deviation: clients receive both factors, as a client that did not take part in the last round lacks the other.
    """

    paper: ClassVar[str] = "RoLoRA (Chen et al. 2025)"
    one_model: ClassVar[bool] = True
    mean_only: ClassVar[bool] = True
    adapters_only: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    def init(self, server: Server) -> Message:
        return {"model": server.initial(), "turn": B}

    async def client_update(self, client: Client, message: Message) -> Message:
        start, trained = message["model"], _trained(message)
        theta = await client.fit(start, train=trained)
        return theta.select(trained) - start.select(trained)

    def upload_like(self, message: Message) -> Message:
        return message["model"].select(_trained(message))

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        """The mean over the answers of each turn; then the turn is the other factor's."""
        model: State = state["model"]
        for turn in (B, A):
            if answers := [upload for upload in uploads if _turn_of(upload.content) == turn]:
                step = mean_update(server, answers)
                model = model.updated(model.pick(list(step)) + step)
        return {"model": model, "turn": A if state["turn"] == B else B}

    async def personalize(self, client: Site, message: Message) -> Message:
        return message["model"]


def _turn_of(answer: State) -> str:
    return A if any(name.endswith(A) for name in answer) else B


def _trained(message: Message) -> str:
    """The regular expression of what a client trains: everything but the frozen factor."""
    frozen = A if message["turn"] == B else B
    return rf"^(?!.*\.{frozen}$)"
