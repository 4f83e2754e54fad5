"""FedMerge's server step against the time to read its rows once from memory, alternating in one run.

python scripts/bench/server.py --clients 88 --models 12 --parameters 3200000
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import torch

from llm_fed.method import Upload
from llm_fed.method.server import Server
from llm_fed.methods.fedmerge import FedMerge
from llm_fed.settings.config import LocalConfig
from llm_fed.state import Layout, State, unstack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=88, help="m; all of them answer")
    parser.add_argument("--models", type=int, default=12, help="d, the server's models")
    parser.add_argument("--parameters", type=int, default=3_200_000, help="P, the parameters of one adapter")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()

    per_layer = given.parameters // given.layers
    layout = Layout(tuple(f"model.layers.{i}.q.lora_A" for i in range(given.layers)), ((per_layer,),) * given.layers)
    like = State(layout, torch.zeros(layout.size))
    soup = unstack(torch.randn(given.models, layout.size), like)
    uploads = [Upload(f"c{i}", 100, 0, State(layout, torch.randn(layout.size))) for i in range(given.clients)]
    rows = [upload.content.row for upload in uploads] + [state.row for state in soup]
    state = {"soup": soup, "logits": {}}
    server = Server("server", None, LocalConfig(), 0, lambda draws: like)  # type: ignore[arg-type]
    # Said, not left to the server's structure: nothing here has one.
    method = FedMerge(num_models=given.models, inner_product="last-layers", weight_step="normalized")

    steps: dict[str, Callable[[], object]] = {
        "read every row once (sum)": lambda: [row.sum() for row in rows],
        "server_update": lambda: asyncio.run(method.server_update(server, state, uploads)),
        "broadcast to all": lambda: [method.broadcast(state, upload.client) for upload in uploads],
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    read = statistics.median(times["read every row once (sum)"])
    gigabytes = sum(row.numel() for row in rows) * 4 / 1e9
    print(f"m = {given.clients}, d = {given.models}, P = {layout.size:,}; {torch.get_num_threads()} threads\n")
    print("| step | seconds, median of", given.repeats, "| times reading once |\n|---|---|---|")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.3f} | {median / read:.2f} |")
    print(f"\nrows: {gigabytes:.2f} GB, read at {gigabytes / read:.1f} GB/s")


if __name__ == "__main__":
    main()
