"""FedBuff: Federated Learning with Buffered Asynchronous Aggregation (Nguyen et al., AISTATS 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.basics.errors import UserError
from llm_fed.merge.robust import lacking
from llm_fed.method import Json, Message, Method, Server, State, Upload, by_arrival
from llm_fed.settings import NonNegativeFloat, PositiveFloat, PositiveInt
from llm_fed.state import rebased


@dataclass(frozen=True)
class FedBuff(Method):
    """One adapter for all, which moves by the mean of every `buffer` updates, however stale they are.

    Updates are not weighted by numbers of examples. The buffer is kept across rounds as a sum, or, with a robust rule
    (`server.aggregation`), which needs each update, as a list. BatchNorm's running statistics go towards the mean
    of the buffer's, whatever `server_lr` is, as they are no parameters; where the buffer is smaller than the cohort, by
    its share of it, so that no client counts for more than in a mean over the cohort.
    Deviation: staleness is counted in rounds of virtual time, not in server steps, so that it means the same for every
    method (`test_fedbuff_weighs_late_updates_down`).
    """

    paper: ClassVar[str] = "FedBuff (Nguyen et al. 2022)"
    one_model: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    buffer: PositiveInt = 10  # M: updates per server step
    server_lr: PositiveFloat = 1.0  # eta_g
    # a: an update counts (1 + staleness)^-a; the FedBuff paper's 0.5 is an option
    staleness_exponent: NonNegativeFloat = 0.0

    def init(self, server: Server) -> Message:
        model = server.initial()
        if server.step.aggregation == "mean":
            return {"model": model, "sum": 0.0 * model, "buffered": 0}
        if why := lacking(self.buffer, server.step):
            raise UserError(f"{why} in the buffer; set method.buffer")
        return {"model": model, "updates": [], "buffered": 0}

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"]

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if "updates" in state:
            return self._robust(server, state, uploads)
        model, total, buffered = state["model"], state["sum"], state["buffered"]
        for upload in by_arrival(server, uploads):
            total = total + self._discounted(upload, state["model"], model)
            buffered += 1
            if buffered == self.buffer:
                row = model.row + self.server_lr / self.buffer * total.row  # omega <- omega + (eta_g / M) sum_i Delta_i
                model = State(model.layout, row, (model + 1 / max(self.buffer, server.cohort) * total).extras)
                total, buffered = 0.0 * total, 0
        return {"model": model, "sum": total, "buffered": buffered}

    def _robust(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        model, updates = state["model"], list(state["updates"])
        for upload in by_arrival(server, uploads):
            updates.append(self._discounted(upload, state["model"], model))
            if len(updates) == self.buffer:
                step, updates = server.average(updates), []
                share = self.buffer / max(self.buffer, server.cohort)
                model = State(model.layout, model.row + self.server_lr * step.row, (model + share * step).extras)
        return {"model": model, "updates": updates, "buffered": len(updates)}

    def _discounted(self, upload: Upload, start: State, model: State) -> State:
        """The update times its weight. `start`: of the round; running statistics are sent as the change from its own.
        `model`: the current one, from whose they are the change afterwards."""
        update = rebased(upload.content, start.extras, model.extras)
        return (1 + upload.staleness) ** -self.staleness_exponent * update

    def report(self, state: Message) -> dict[str, Json]:
        return {"buffered": state["buffered"]}
