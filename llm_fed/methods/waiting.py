"""Which answers a step of federated averaging waits for when they may be late. Shared by several methods.

- none: each round takes a step on whatever arrives in it.
- deadline: a step only takes answers that arrive in the round that requested them; later ones are dropped.
- first_n: a step takes the first answers to the current model, one per client and as many as clients are asked in a
  round, however many rounds they take; the others are dropped. The server's state then holds, beside the model, the
  round in which it was first sent and the answers.
"""

from __future__ import annotations

from typing import Literal

from llm_fed.method import Message, Server, State, Upload, averaged, by_arrival

Wait = Literal["none", "deadline", "first_n"]


def begun(model: State, wait: Wait) -> Message:
    """The server's state with a model that no client has answered yet."""
    return _afresh(model, 1) if wait == "first_n" else model


def model_of(state: Message, wait: Wait) -> State:
    """What clients are sent."""
    return state["model"] if wait == "first_n" else state


def step(server: Server, state: Message, uploads: list[Upload], wait: Wait, needed: int) -> Message:
    """The state after what arrived in a round: the model moves by the mean of the updates that count, if it moves.
    `needed`: first_n: so many answers."""
    if wait == "none":
        return averaged(server, state, uploads)
    if wait == "deadline":
        return averaged(server, state, [upload for upload in uploads if upload.staleness == 0])
    for upload in by_arrival(server, uploads):
        # The current model was first sent in round `since`: who was asked before answers an older one.
        current = server.round - upload.staleness >= state["since"]
        if current and upload.client not in state["deltas"] and len(state["deltas"]) < needed:
            state = counted(state, upload)
    if len(state["deltas"]) < needed:
        return state
    deltas, sizes = list(state["deltas"].values()), list(state["sizes"].values())
    return _afresh(state["model"] + server.average(deltas, sizes), server.round + 1)


def counted(state: Message, upload: Upload) -> Message:
    """first_n: the state with an answer to its model."""
    deltas = {**state["deltas"], upload.client: upload.content}
    return {**state, "deltas": deltas, "sizes": {**state["sizes"], upload.client: upload.num_examples}}


def _afresh(model: State, since: int) -> Message:
    return {"model": model, "since": since, "deltas": {}, "sizes": {}}
