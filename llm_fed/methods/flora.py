"""FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations (Wang, Shen, He, Sun,
Wang, Lyu, Li; NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llm_fed.basics.rng import generator
from llm_fed.merge import delta
from llm_fed.merge.factors import heads, stacked
from llm_fed.method import Client, Message, Method, Server, Site, State, Structure, Upload
from llm_fed.methods import folded, served
from llm_fed.state import FACTORS, HEAD, Layout, factor_of
from llm_fed.state.roles import Echo, Roles


@dataclass(frozen=True)
class FLoRA(Method):
    """In each round every client trains a fresh adapter of its rank; the server stacks them, so that their product is
    the exact mean of the clients' products, and each client adds the stack to its base before the next round.

    The rank of the stack that is sent is the sum of the cohort's ranks. A client that missed a stack receives the sum
    of all. An image model's head is averaged. The exported adapter contains all stacks.
    """

    paper: ClassVar[str] = "FLoRA (Wang et al. 2024)"
    adapters_only: ClassVar[bool] = True
    any_rank: ClassVar[bool] = True
    one_model: ClassVar[bool] = True
    sends: ClassVar[Roles] = {"version": Echo()}

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.over_frozen()

    def init(self, server: Server) -> Message:
        model = server.initial()
        before = delta.nothing(model)
        if server.start is not None:  # a run that starts from an adapter has it in its base
            before = delta.of_pairs(stacked([model], [server.structure.scaling]), model)
        return {
            "head": _head(model), "like": {name: list(shape) for name, shape in model.layout.shape_of.items()},
            "clients": served.clients_of(server), **folded.begun(before),
        }  # fmt: skip

    def broadcast(self, state: Message, client: str) -> Message:
        rank = state["clients"].get(client, {}).get("rank")
        like = {name: _at_rank(name, shape, rank) for name, shape in state["like"].items()}
        return {"head": state["head"], "like": like, **folded.sent(state, client)}

    async def client_update(self, client: Client, message: Message) -> Message:
        whole = folded.received(client, message)
        fresh = client.draw(generator(client.seed, "fresh", client.round, client.id)).updated(message["head"])
        theta = await client.fit(delta.beneath(fresh, whole))
        folded.keep(client, message, whole)
        return folded.answer(message, theta)

    def upload_like(self, message: Message) -> Message:
        layout = Layout(tuple(message["like"]), tuple(tuple(shape) for shape in message["like"].values()))
        return folded.answer(message, State(layout, message["head"].row.new_zeros(layout.size)))

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        uploads, adapters, examples = folded.answers(uploads)
        # p_k s_k: A is stacked as it is, B with its weight and its client's scaling.
        weights = []
        for upload, n in zip(uploads, examples, strict=True):
            factor = state["clients"].get(upload.client, {}).get("factor", 1.0)
            weights.append(n / sum(examples) * server.structure.scaling / factor)
        step = delta.of_pairs(stacked(adapters, weights), state["head"])
        head = State.of(heads(adapters, examples)) if len(state["head"]) else state["head"]
        return {**state, "head": head, **folded.advanced(state, step, uploads)}

    async def personalize(self, client: Site, message: Message) -> Message:
        return delta.beneath((0.0 * client.initial()).updated(message["head"]), folded.received(client, message))


def _head(model: State) -> State:
    names = [name for name in model if factor_of(name) == HEAD]
    return model.pick(names) if names else delta.nothing(model)


def _at_rank(name: str, shape: list[int], rank: int | None) -> list[Any]:
    """The shape of an entry in an adapter of this rank (None: as it is)."""
    if rank is None or factor_of(name) == HEAD:
        return shape
    return [rank, shape[1]] if name.endswith(FACTORS[0]) else [shape[0], rank]
