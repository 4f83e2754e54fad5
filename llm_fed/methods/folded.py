"""What the methods share whose server adds to the base for all clients (`merge.delta`). No method itself.

A client keeps what was added, and is sent the last step alone if it has all before it, else the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_fed.merge import delta
from llm_fed.method import Client, Message, Site, State, Upload


def begun(whole: State) -> dict[str, Message]:
    """The server's part: `step` leads from version - 1 to version; `holds`: a client's version at its last answer."""
    return {"delta": whole, "step": None, "version": 0, "holds": {}}


def sent(state: Message, client: str) -> dict[str, Message]:
    """What a client is sent of it."""
    whole = state["step"] is None or state["holds"].get(client) != state["version"] - 1
    return {"version": state["version"], "whole": whole, "delta": state["delta" if whole else "step"]}


def received(client: Site, message: Message) -> State:
    """The delta of the message's version."""
    if message["whole"]:
        return message["delta"]
    kept = client.memory["delta"]
    return kept["delta"] if kept["version"] == message["version"] else delta.added(kept["delta"], message["delta"])


def keep(client: Client, message: Message, whole: State) -> None:
    """Remember the delta, for the next message."""
    client.memory["delta"] = {"version": message["version"], "delta": whole}


def answer(message: Message, theta: State) -> Message:
    """What is uploaded: what was trained, without what lay beneath it."""
    return {"version": message["version"], "adapter": State(theta.layout, theta.row)}


def answers(uploads: Sequence[Upload]) -> tuple[list[Upload], list[State], list[float]]:
    """The uploads by client, so that factors that are stacked do not depend on the order in which they arrived; and of
    each the adapter and the number of examples."""
    ordered = sorted(uploads, key=lambda upload: (upload.client, upload.staleness))
    adapters = [upload.content["adapter"] for upload in ordered]
    return ordered, adapters, [float(upload.num_examples) for upload in ordered]


def advanced(state: Message, step: State, uploads: Sequence[Upload]) -> dict[str, Message]:
    """The server's part of the state after a step."""
    holds = {**state["holds"], **{upload.client: upload.content["version"] for upload in uploads}}
    return {
        "delta": delta.added(state["delta"], step), "step": step, "version": state["version"] + 1,
        "holds": dict(sorted(holds.items())),
    }  # fmt: skip
