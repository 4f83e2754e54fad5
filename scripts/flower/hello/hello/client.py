"""Every message comes back with other bytes of the same number."""

from __future__ import annotations

import os

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Not the same bytes: Flower does not send an object that the other side has already."""
    size = len(message.content.array_records["hello"]["bytes"].data)
    answer = ArrayRecord({"bytes": Array("uint8", (size,), "bytes", os.urandom(size))})
    return Message(RecordDict({"hello": answer}), reply_to=message)
