"""APFL: Adaptive Personalized Federated Learning (Deng, Kamani, Mahdavi 2020), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from llm_fed.basics.errors import UserError
from llm_fed.method import Client, Message, Method, Server, Site, State, Upload
from llm_fed.settings import AtLeast, AtMost


@dataclass(frozen=True)
class APFL(Method):
    """A client's model is alpha v + (1 - alpha) w: w is averaged with the others', v never leaves the client, and each
    client learns its own alpha.

    On each batch w takes a step on the loss at w, and v one on the loss at the mixture, both by plain SGD.
    Deviation: alpha is kept in [0, 1], as in published code, since a mixture outside of it is none.
    """

    paper: ClassVar[str] = "APFL (Deng et al. 2020)"
    robust: ClassVar[bool] = True
    looks: ClassVar[bool] = True  # it asks for gradients

    alpha: Annotated[float, AtLeast(0), AtMost(1)] = 0.5  # of the first round; 0: FedAvg, 1: local training
    adaptive: bool = True  # whether alpha is learned

    def init(self, server: Server) -> Message:
        if server.local.optimizer != "sgd" or server.local.momentum:
            raise UserError("apfl takes plain steps of SGD one at a time; set local.optimizer=sgd and local.momentum=0")
        return server.initial()

    async def client_update(self, client: Client, message: Message) -> Message:
        w, v, alpha = message, *_own(client, self.alpha, message)
        for places in client.indices(client.num_examples):
            batch = [client.train[place] for place in places]
            _, gradient = await client.gradient(_mixed(alpha, v, w), batch)
            slope = float(((v.row - w.row) * gradient.row).sum())  # of the mixture's loss by alpha
            moved = min(1.0, max(0.0, alpha - client.lr * slope)) if self.adaptive else alpha
            w = await client.fit(w, examples=batch, steps=1)
            v = State(v.layout, v.row - client.lr * alpha * gradient.row, w.extras)  # the chain rule brings alpha
            alpha = moved
        client.memory["v"], client.memory["alpha"] = v, alpha
        return w - message

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        return state + server.average([upload.content for upload in uploads]) if uploads else state

    async def personalize(self, client: Site, message: Message) -> Message:
        v, alpha = _own(client, self.alpha, message)
        return _mixed(alpha, v, message)


def _own(client: Client, alpha: float, message: State) -> tuple[State, float]:
    """v and alpha; at first the common start and the setting."""
    return client.memory.get("v", client.initial()), client.memory.get("alpha", alpha)


def _mixed(alpha: float, v: State, w: State) -> State:
    return State(w.layout, alpha * v.row + (1 - alpha) * w.row, w.extras)
