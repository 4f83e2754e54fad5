"""Sends `size` random bytes to every node and waits for the answers, `rounds` times."""

from __future__ import annotations

import json
import os
import time

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Prints a line {"round", "seconds" until the last answer} per round; ends with an error on a bad answer."""
    nodes, rounds, size = (int(context.run_config[key]) for key in ("nodes", "rounds", "size"))
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.1)
    for number in range(rounds):
        start = time.perf_counter()
        waiting = set(grid.push_messages([_hello(node, size) for node in grid.get_node_ids()]))
        while waiting:
            for reply in grid.pull_messages(waiting):
                if reply.has_error() or len(reply.content.array_records["hello"]["bytes"].data) != size:
                    raise RuntimeError(f"{reply.metadata.src_node_id} answered {reply}")
                waiting.remove(reply.metadata.reply_to_message_id)
            time.sleep(0.05)
        print(json.dumps({"round": number, "seconds": time.perf_counter() - start}), flush=True)


def _hello(node: int, size: int) -> Message:
    content = RecordDict({"hello": ArrayRecord({"bytes": Array("uint8", (size,), "bytes", os.urandom(size))})})
    return Message(content, dst_node_id=node, message_type="train")
