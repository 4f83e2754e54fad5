"""FlexLoRA: Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources (Bai, Chen,
Qian, Yao, Li; NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.merge.factors import cut, heads, rank_of, stacked
from llm_fed.method import Client, Message, Method, Server, Upload
from llm_fed.methods import served


@dataclass(frozen=True)
class FlexLoRA(Method):
    """The server averages the clients' full products `s B A` in each layer, and each client is sent the singular value
    decomposition of the mean, truncated to its rank: `B = U S / s`, `A = V`, as in the authors' code.

    The server keeps as many components of the mean as the largest rank of a client. An image model's head is averaged
    entry by entry.
    """

    paper: ClassVar[str] = "FlexLoRA (Bai et al. 2024)"
    adapters_only: ClassVar[bool] = True
    any_rank: ClassVar[bool] = True

    def init(self, server: Server) -> Message:
        return {"model": server.initial(), "clients": served.clients_of(server)}

    def broadcast(self, state: Message, client: str) -> Message:
        return served.part(state["model"], state["clients"], client)

    async def client_update(self, client: Client, message: Message) -> Message:
        return await client.fit(message)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        model, total = state["model"], sum(upload.num_examples for upload in uploads)
        examples = [float(upload.num_examples) for upload in uploads]
        # W = sum_k n_k / n s_k B_k A_k, in the server's scaling
        factors = [served.of(state["clients"], upload.client, model)[1] for upload in uploads]
        adapters = [upload.content for upload in uploads]
        mean = stacked(adapters, [n / total / factor for n, factor in zip(examples, factors, strict=True)])
        adapter = cut(model, heads(adapters, examples), mean, rank_of(model))
        return {"model": adapter, "clients": state["clients"]}
