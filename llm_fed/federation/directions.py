"""How the update of each client compares with the others of its round, so that one finds the client that spoils it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from llm_fed.method import Method, Upload
from llm_fed.state import State
from llm_fed.state.roles import Weights, leaves, role_of
from llm_fed.state.wire import Message

DIGITS = 3  # significant ones, which is what a picture shows; the last bits depend on the packing


def compared(method: Method, state: Message, uploads: Sequence[Upload]) -> dict[str, list[float | None]]:
    """By client the norm of its update, and its cosine with the mean of the other updates of the round; None where no
    other has the same shape, or one of the two is zero. Of uploads without states nothing is known. `state`: of the
    server, before its step."""
    rows: dict[str, Tensor] = {}
    for upload in uploads:
        parts = [leaf.row for _, leaf in leaves(upload.content) if isinstance(leaf, State)]
        if parts:
            rows[upload.client] = torch.cat(parts).double()
    models = _sent(method, state, uploads) if any(_may_be_model(method, upload) for upload in uploads) else {}
    if rows and models.keys() >= rows.keys() and _are_models(rows, models):
        rows = {client: row - models[client] for client, row in rows.items()}
    sums: dict[int, Tensor] = {}
    for row in rows.values():
        sums[len(row)] = sums[len(row)] + row if len(row) in sums else row.clone()
    return {client: [_short(row.norm()), _cosine(row, sums[len(row)] - row)] for client, row in rows.items()}


def _sent(method: Method, state: Message, uploads: Sequence[Upload]) -> dict[str, Tensor]:
    """What the clients are sent, where that is a state like their upload."""
    found = {}
    for upload in uploads:
        message = method.broadcast(state, upload.client)
        if isinstance(message, State) and isinstance(upload.content, State) and message.layout == upload.content.layout:
            found[upload.client] = message.row.double()
    return found


def _may_be_model(method: Method, upload: Upload) -> bool:
    role = role_of(method.sends, "", upload.content)
    return isinstance(role, Weights) and not role.changes


def _are_models(rows: Mapping[str, Tensor], models: Mapping[str, Tensor]) -> bool:
    """Whether uploads are models after training, and not their change: these are nearer to the model than to zero."""
    return fmean(float((row - models[id]).norm()) for id, row in rows.items()) < fmean(
        float(row.norm()) for row in rows.values()
    )


def _cosine(row: Tensor, others: Tensor) -> float | None:
    norms = float(row.norm() * others.norm())
    return _short((row @ others) / norms) if norms > 1e-30 else None


def _short(value: Any) -> float:
    return float(f"{float(value):.{DIGITS}g}")
