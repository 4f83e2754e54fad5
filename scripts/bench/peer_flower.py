"""The plain loop of peer_loops.py as clients of Flower's simulation: FedAvg, and Ray's actors, which keep the base."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_loops import Adapter, Work, trained

client_app = ClientApp()


@cache
def _loaded(folder: str) -> tuple[Work, Any]:
    """Once in each actor."""
    work = Work(Path(folder))
    torch.set_num_threads(max(1, work.threads // work.actors))
    return work, work.model()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    content: Any = message.content
    config = content["config"]
    work, model = _loaded(config["folder"])
    asked, before = work.rounds[config["server-round"] - 1][config["place"]], model.tokens_seen
    adapter = trained(work, model, content["arrays"].to_torch_state_dict(), asked["batches"])
    metrics = MetricRecord({"num-examples": asked["num_examples"], "tokens": model.tokens_seen - before})
    return Message(RecordDict({"arrays": ArrayRecord(adapter), "metrics": metrics}), reply_to=message)


class Planned(FedAvg):
    """Asks the planned clients in the place of random ones, and takes the time of each round."""

    def __init__(self, work: Work):
        super().__init__(fraction_evaluate=0.0)
        self.work, self.began = work, 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.began, nodes = time.perf_counter(), sorted(grid.get_node_ids())
        messages = []
        for place, asked in enumerate(self.work.rounds[server_round - 1]):
            order = ConfigRecord({"folder": str(self.work.folder), "server-round": server_round, "place": place})
            content = RecordDict({"arrays": arrays, "config": order})
            messages.append(Message(content, dst_node_id=nodes[asked["number"]], message_type="train"))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if failed := [reply.error.reason for reply in replies if reply.has_error()]:
            raise RuntimeError(f"{len(failed)} of {len(replies)} clients failed; the first one: {failed[0]}")
        aggregated = super().aggregate_train(server_round, replies)
        self.work.seconds.append(time.perf_counter() - self.began)
        contents: list[Any] = [reply.content for reply in replies]
        self.work.tokens.append(sum(content["metrics"]["tokens"] for content in contents))
        return aggregated


def simulated(work: Work) -> Adapter:
    """As many clients at once as there are actors; each actor has its share of the threads."""
    server_app, results = ServerApp(), []

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Planned(work)
        results.append(strategy.start(grid, ArrayRecord(work.start()), num_rounds=len(work.rounds)))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": work.actors}}
    run_simulation(server_app, client_app, work.clients, backend_config=resources)
    adapter: Adapter = results[0].arrays.to_torch_state_dict()
    return adapter
