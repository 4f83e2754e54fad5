"""FedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous Personalized Federated Learning
(Yi, Yu, Ren, Zhang, Wang, Liu, Li 2024), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from llm_fed.method import Client, Message, Method, Server, refuse_inert
from llm_fed.models.structure import GateShape, Structure
from llm_fed.settings import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class FedMoE(Method):
    """Each client's own model and a small extractor shared by all, whose features a gate weighs for each image (Eq.
    3-6, `models.joined`).

    Cross-entropy trains all three together (Eq. 7, 8). Only the small extractor is sent: `base.name` without its head,
    averaged with weights n_k / n (Eq. 9). The gate's running statistics stay at the client with the gate.
    Deviation: the gate's switchable normalisation mixes two kinds of statistics, as the third has no meaning after
    flattening (`models.joined.SwitchNorm`).
    """

    paper: ClassVar[str] = "FedMoE (Yi et al. 2024)"
    mean_only: ClassVar[bool] = True
    whole_models: ClassVar[bool] = True
    any_model: ClassVar[bool] = True
    shared: ClassVar[str] = r"^small\."

    # eta_phi: the gate's learning rate in the first round, which falls as `local.lr` does; null: `local.lr`
    gate_lr: PositiveFloat | None = None
    gate: Literal["learned", "even"] = "learned"  # even: both extractors always count one half
    gate_width: PositiveInt = 32  # m, neurons of the gate's hidden layer; the paper gives no number
    gate_norm: bool = True  # batch normalisation of the gate's scores before its softmax, as in the paper

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        wrapped: Any = structure.beside("own", "small", "gate" if self.gate == "learned" else "even")
        return replace(wrapped, gate=GateShape(self.gate_width, self.gate_norm))

    def init(self, server: Server) -> Message:
        for setting in ("gate_lr", "gate_width", "gate_norm"):
            refuse_inert(self, setting, self.gate == "learned", "method.gate=learned")
        return super().init(server)

    async def client_update(self, client: Client, message: Message) -> Message:
        if self.gate == "even":
            return await super().client_update(client, message)
        gate_lr = client.lr if self.gate_lr is None else self.gate_lr * client.lr / client.local.lr
        optimizer = replace(client.optimizer, lr_of={r"^gate\.": gate_lr})
        theta = await client.fit(client.assemble(message), optimizer=optimizer)
        client.keep(theta, self.trained, message)
        return theta.select(self.shared) - message
