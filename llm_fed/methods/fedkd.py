"""FedKD: Communication-efficient federated learning via knowledge distillation (Wu, Wu, Lyu, Huang, Xie; Nature
Communications 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.method import Client, Message, Method, Server, Site, State, Structure, Upload
from llm_fed.method.losses import divergence
from llm_fed.models.joined import Answer
from llm_fed.settings import Above, AtMost
from llm_fed.state.lowrank import truncated
from llm_fed.state.roles import Echo, Roles, Weights

Energy = Annotated[float, Above(0), AtMost(1), "1 for all"]
LEAST_LOSS = 0.01  # the sum of both cross-entropies by which the distillation is divided counts as at least this


@dataclass(frozen=True)
class FedKD(Method):
    """Each client's own model (mentor) and a small one shared by all (mentee) distil into each other, the more the
    better both fit the labels; updates of the small one are sent in both directions as truncated singular value
    decompositions.

    The share of a matrix's energy that is kept rises linearly over the rounds. The server takes the same truncated step
    as its clients; a client that missed a step receives the whole small model. The client's own model classifies.
    Deviation: there is no learned projection between the models' features, so both must have equally many.
    Deviation: in the published code gradients also flow into the teachers and the divisor, so its growth would lower
    the loss; here both are constants, and the divisor is at least 0.01, as steps would be unbounded on memorised
    examples (`test_fedkd_divides_by_a_constant_that_is_not_too_small`).
    Deviation: the mean of updates is weighted by n_k / n as in FedAvg; in the published code all have equal weights
    (`test_the_mean_is_weighed_by_numbers_of_examples`).
    """

    paper: ClassVar[str] = "FedKD (Wu et al. 2022)"
    whole_models: ClassVar[bool] = True
    any_model: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    shared: ClassVar[str] = r"^small\."
    # Statistics as they are: the server does not keep which ones a late answer would be the change from.
    sends: ClassVar[Roles] = {"version": Echo(), "update": Weights(changes=False, known=False)}

    energy: Energy = 0.95  # T_start: the share of the squared singular values that is kept in the beginning
    energy_end: Energy = 0.98  # T_end: in the last round

    @property
    def by_rounds(self) -> bool:  # type: ignore[override]
        return self.energy != self.energy_end

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.beside("own", "small", "first")

    def init(self, server: Server) -> Message:
        # `step` leads from version - 1 to version; `holds`: the version that a client had when it last answered
        return {"model": server.initial().select(self.shared), "version": 0, "step": None, "holds": {}}

    def broadcast(self, state: Message, client: str) -> Message:
        whole = state["step"] is None or state["holds"].get(client) != state["version"] - 1
        return {"version": state["version"], "whole": whole, "model": state["model" if whole else "step"]}

    async def client_update(self, client: Client, message: Message) -> Message:
        small = _received(client, message)
        theta = await client.fit(client.assemble(small), loss=self.loss)
        client.keep(theta, self.trained, small)
        client.memory["small"] = {"version": message["version"], "model": small}
        trained = theta.select(self.shared)
        update = State(trained.layout, trained.row - small.row, trained.extras)
        return {"version": message["version"], "update": truncated(update, self.energy_at(client))}

    def upload_like(self, message: Message) -> Message:
        return {"version": message["version"], "update": message["model"]}

    def loss(self, answer: Answer, labels: Tensor, indices: Tensor) -> Tensor:
        own, small = answer.parts["own"], answer.parts["small"]
        if own.features.shape != small.features.shape:
            raise UserError(
                f"fedkd needs equally many features, but a client's own model has {own.features.shape[1]} and the "
                f"small one {small.features.shape[1]}; choose other models in base.name and base.clients"
            )
        known = nn.functional.cross_entropy(own.logits, labels) + nn.functional.cross_entropy(small.logits, labels)
        taught = _distance(own, small) + _distance(small, own)
        return known + taught / known.detach().clamp(min=LEAST_LOSS)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        updates = [upload.content["update"] for upload in uploads]
        mean = server.average(updates, [upload.num_examples for upload in uploads])
        mean = State(mean.layout, mean.row, (mean - state["model"]).extras)  # of statistics the change, too
        step = truncated(mean, self.energy_at(server))
        holds = {**state["holds"], **{upload.client: upload.content["version"] for upload in uploads}}
        return {
            "model": state["model"] + step, "version": state["version"] + 1, "step": step,
            "holds": dict(sorted(holds.items())),
        }  # fmt: skip

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.assemble(_received(client, message))

    def energy_at(self, site: Site) -> float:
        return self.energy + (self.energy_end - self.energy) * site.round / site.rounds


def _received(client: Site, message: Message) -> State:
    """The small model of the message's version."""
    if message["whole"]:
        return message["model"]
    kept = client.memory["small"]
    return kept["model"] if kept["version"] == message["version"] else kept["model"] + message["model"]


def _distance(taught: Answer, teacher: Answer) -> Tensor:
    """Of the predictions and of the features; the teacher learns nothing from it."""
    hidden = nn.functional.mse_loss(taught.features, teacher.features.detach())
    return divergence(taught.logits, teacher.logits).mean() + hidden
