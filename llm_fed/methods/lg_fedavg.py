"""LG-FedAvg: Think Locally, Act Globally: Federated Learning with Local and Global Representations (Liang, Liu, Liu,
Allen, Auerbach, Brent, Salakhutdinov, Morency 2020)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server, Site, State
from llm_fed.method.heads import check_head


@dataclass(frozen=True)
class LGFedAvg(Method):
    """The layers that all clients' models have in common, here the head, are averaged; the layers below, in which the
    models may differ, stay with their client. Both are trained together.

    Deviation: the published code starts from a model trained by federated averaging; here all models start untrained,
    since different models have no common start. It averages without weights; here they are n_k / n as in FedAvg
    (`test_the_mean_is_weighed_by_numbers_of_examples`).
    """

    paper: ClassVar[str] = "LG-FedAvg (Liang et al. 2020)"
    mean_only: ClassVar[bool] = True
    whole_models: ClassVar[bool] = True
    any_model: ClassVar[bool] = True

    def init(self, server: Server) -> Message:
        return _head(server.initial())

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = await client.fit(self._assembled(client, message))
        client.keep(theta, self.trained, message.renamed("head.", f"{theta.layout.head}."))
        return _head(theta) - message

    async def personalize(self, client: Site, message: Message) -> Message:
        return self._assembled(client, message)

    def _assembled(self, client: Site, message: Message) -> State:
        fresh = client.initial()
        check_head(client, fresh, message["head.weight"].shape)
        return client.assemble(message.renamed("head.", f"{fresh.layout.head}."))


def _head(state: State) -> State:
    """The head's entries, whose names are the same in every model."""
    name = state.layout.head
    return state.select(rf"^{re.escape(name)}\.").renamed(f"{name}.", "head.")
