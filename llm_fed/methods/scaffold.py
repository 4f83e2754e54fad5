"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh;
ICML 2020), Algorithm 1 with option II."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from llm_fed.basics.errors import UserError
from llm_fed.merge.mean import mean
from llm_fed.method import Client, Message, Method, Server, Site, State, Upload
from llm_fed.settings import PositiveFloat


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg with control variates: clients correct every gradient by c - c_i, the mean of all clients' past gradients
    minus that of their own. All clients weigh the same. An answer that never arrives leaves c behind the mean of the
    c_i. BatchNorm's running statistics go to the clients' mean, whatever `server_lr` is."""

    paper: ClassVar[str] = "SCAFFOLD (Karimireddy et al. 2020)"
    summed: ClassVar[Literal["examples", "clients"] | None] = "clients"

    server_lr: PositiveFloat = 1.0  # eta_g, as in the paper's experiments

    def init(self, server: Server) -> Message:
        model, local = server.initial(), server.local
        if local.optimizer != "sgd" or local.momentum or not local.lr_end:
            raise UserError("scaffold computes mean gradients from the distance that plain SGD moves; set "
                            "local.optimizer=sgd, local.momentum=0 and local.lr_end above 0")  # fmt: skip
        if local.decay != "constant" or local.warmup_steps:
            raise UserError("scaffold computes mean gradients from steps of one learning rate; set "
                            "local.decay=constant and local.warmup_steps=0")  # fmt: skip
        return {"model": model, "control": 0 * model.pick(tuple(model))}

    async def client_update(self, client: Client, message: Message) -> Message:
        x, c = message["model"], message["control"]
        before = client.memory.get("control", 0 * c)
        y = await client.fit(x, optimizer=replace(client.optimizer, correction=c - before))  # line 10
        after = before - c + (x - y) * (1 / (len(client.losses) * client.lr))  # line 12, option II
        client.memory["control"] = after
        return {"model": y - x, "control": after - before}

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        x, delta = state["model"], mean([upload.content["model"] for upload in uploads])
        x = State(x.layout, x.row + self.server_lr * delta.row, (x + delta).extras)  # line 16
        share = 1 / len(server.clients)  # line 17
        return {"model": x, "control": sum((share * u.content["control"] for u in uploads), state["control"])}

    async def personalize(self, client: Site, message: Message) -> Message:
        return message["model"]
