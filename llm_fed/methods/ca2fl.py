"""CA2FL: Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update Calibration (Wang, Cao,
Wu, Chen, Chen; ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Json, Message, Method, Server, State, Upload, by_arrival
from llm_fed.settings import PositiveFloat, PositiveInt
from llm_fed.state import rebased


@dataclass(frozen=True)
class CA2FL(Method):
    """FedBuff whose step stands for all clients: a client that is not in the buffer counts with the last update it
    sent.

    The server keeps this update h_i of every client (zero before its first answer) in its memory, and the mean of all
    h_i in its state. So the cost of a step and of a checkpoint depends on the buffer, not on the number of clients.
    BatchNorm's running statistics go towards the mean of the buffer's as in FedBuff: those of last updates, added anew
    in each step, would make variances negative.
    """

    paper: ClassVar[str] = "CA2FL (Wang et al. 2024)"
    one_model: ClassVar[bool] = True

    buffer: PositiveInt = 10  # M: updates per server step
    server_lr: PositiveFloat = 1.0  # eta_g

    def init(self, server: Server) -> Message:
        model = server.initial()
        return {"model": model, "mean": 0.0 * model, "sum": 0.0 * model, "waiting": [], "buffered": 0}

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"]

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        model, mean, total, buffered = state["model"], state["mean"], state["sum"], state["buffered"]
        memory, waiting = server.memory, list(state["waiting"])  # who is in the buffer
        for upload in by_arrival(server, uploads):
            cached = memory.get(f"cache/{upload.client}")
            update = rebased(upload.content, state["model"].extras, model.extras)
            row = update.row if cached is None else update.row - cached.row
            total = total + update.like(row)  # sum_i (Delta_i - h_i)
            memory[f"waiting/{upload.client}"] = upload.content
            waiting += [] if upload.client in waiting else [upload.client]
            buffered += 1
            if buffered == self.buffer:
                calibrated = mean.row + 1 / self.buffer * total.row  # v = mean_i(h_i) + (1/M) sum_i (Delta_i - h_i)
                row = model.row + self.server_lr * calibrated  # omega <- omega + eta_g v
                model = State(model.layout, row, (model + 1 / max(self.buffer, server.cohort) * total).extras)
                for client in waiting:  # h_i <- Delta_i, and the mean with it
                    delta, cached = memory.pop(f"waiting/{client}"), memory.get(f"cache/{client}")
                    mean = mean + 1 / len(server.clients) * (delta if cached is None else delta - cached)
                    memory[f"cache/{client}"] = delta
                waiting, total, buffered = [], 0.0 * total, 0
        return {"model": model, "mean": mean, "sum": total, "waiting": waiting, "buffered": buffered}

    def report(self, state: Message) -> dict[str, Json]:
        return {"buffered": state["buffered"]}
