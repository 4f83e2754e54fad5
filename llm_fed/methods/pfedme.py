"""pFedMe: Personalized Federated Learning with Moreau Envelopes (Dinh, Tran, Nguyen; NeurIPS 2020), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from llm_fed.basics.errors import UserError
from llm_fed.method import Client, Message, Method, Server, Site, State, Upload, averaged, refuse_proximal
from llm_fed.settings import Above, AtMost, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class PFedMe(Method):
    """A global model w with a personal model theta near it at each client: a client finds theta, moves w towards it,
    and sends w.

    `local.lr` is the learning rate of theta. A round takes `local_rounds * inner_steps` steps, whatever `local.steps`
    is.
    Deviation: each inner step takes its own batch; in the published code all steps of a local round share one
    (`test_pfedme_by_hand`).
    """

    paper: ClassVar[str] = "pFedMe (Dinh et al. 2020)"
    robust: ClassVar[bool] = True

    strength: PositiveFloat = 15.0  # lambda of lambda / 2 ||theta - w||^2; the paper tries 10 to 40
    local_rounds: PositiveInt = 4  # R
    inner_steps: PositiveInt = 5  # K
    outer_lr: PositiveFloat = 0.005  # eta of w <- w - eta lambda (w - theta)
    mixing: Annotated[float, Above(0), AtMost(2)] = 1.0  # beta of w <- (1 - beta) w + beta mean

    def init(self, server: Server) -> Message:
        refuse_proximal(server, "pfedme", "method.strength")
        if self.outer_lr * self.strength > 1:
            raise UserError(
                f"method.outer_lr * method.strength is {self.outer_lr * self.strength:g}; it must be at most 1 (where "
                "w becomes theta), so lower one of them"
            )
        return server.initial()

    async def client_update(self, client: Client, message: Message) -> Message:
        w = theta = message
        for _ in range(self.local_rounds):
            near = replace(client.optimizer, proximal=self.strength / 2, anchor=w)
            theta = await client.fit(theta, steps=self.inner_steps, optimizer=near)  # Eq. 7
            moved = w + self.outer_lr * self.strength * (theta - w)  # Eq. 8
            w = State(moved.layout, moved.row, theta.extras)
        client.memory["personal"] = theta
        return w - message

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        mean = averaged(server, state, uploads)
        return State(mean.layout, (state + self.mixing * (mean - state)).row, mean.extras)

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory.get("personal", message)
