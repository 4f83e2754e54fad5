"""Feddle: Guided Model Merging for Hybrid Data Learning (Zhu et al. 2025), Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.merge import mean
from llm_fed.method import Json, Message, Method, Server, State, Upload, by_arrival, refuse_inert
from llm_fed.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from llm_fed.state import stack


@dataclass(frozen=True)
class Feddle(Method):
    """One model for all, moved along the clients' last updates by coefficients that are learned on the server's data.

    The last updates, however late, are the anchors of an atlas. In each round the server searches one coefficient per
    anchor on its data, starting where FedBuff would end (the fallback); coefficients may be negative. If the data are
    of another domain, an image model is evaluated with a new head for their labels (Eq. 8, 9), and the coefficients are
    held near the fallback. A language model keeps its head, as the vocabulary is the same in every domain. With a
    robust rule (`server.aggregation`) the fallback is the robust mean of the same updates, which need not be a
    combination of anchors: the search starts with the model there and all coefficients at zero.
    Deviation: the paper leaves open what the fallback averages; here this round's updates. Those that arrive together
    do not overwrite each other in the atlas, as Algorithm 1, lines 16 and 17, would let them. The new head is no
    optimum (Eq. 8) but fitted for `head_epochs` from the last round's.
    Running statistics (BatchNorm) take no part in the search: they move by the mean of the uploads that arrived.
    """

    paper: ClassVar[str] = "Feddle (Zhu et al. 2025)"
    one_model: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    atlas_size: PositiveInt | None = None  # M: most anchors; null: twice the clients asked per round
    search_epochs: NonNegativeInt = 1  # passes over the server's examples in each round's search; 0: FedBuff
    search_lr: PositiveFloat = 1e-3  # eta_c of Adam
    server_lr: PositiveFloat = 1.0  # eta_g of the fallback
    normalize: bool = True  # anchors to the median norm (Eq. 4)
    importance: bool = True  # the anchor of the smallest |c| makes room; false: the oldest
    fallback_start: bool = True  # the search starts at the fallback; false: at zero
    # lambda of (lambda/2) ||c - fallback||^2; null: 0, out of domain 0.01
    regularization: NonNegativeFloat | None = None
    head_epochs: PositiveInt = 1  # out of domain: passes over the server's examples to fit the new head, each round
    head_lr: PositiveFloat = 1e-3

    def init(self, server: Server) -> Message:
        if self.search_epochs and not server.train:
            raise UserError(
                "feddle searches on the server's own examples, and the server has none; set task.server.examples, "
                "or method.search_epochs=0"
            )
        if server.step.aggregation != "mean" and not self.fallback_start:
            raise UserError("method.fallback_start=false takes no mean of the updates, so server.aggregation has no "
                            "effect; set server.aggregation=mean")  # fmt: skip
        model = server.initial()
        head = server.new_head(model) if server.data.foreign and server.data.num_labels else None
        for setting in ("head_epochs", "head_lr"):
            refuse_inert(self, setting, head is not None, "pictures of another task at the server (task.server.name)")
        return {"model": model, "anchors": [], "importance": [], "head": head, "search": {}}

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"]

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        model, head = state["model"], state["head"]
        arrivals = [upload.content for upload in by_arrival(server, uploads)]
        anchors, importance = self._add(server, state["anchors"], state["importance"], arrivals)
        if not anchors:
            return state
        atlas, scales = normalized(anchors, self.normalize)  # Eq. 4
        counted = torch.tensor([score is None for score in importance]).to(scales)
        # FedBuff's step, in terms of the normalised anchors.
        fallback = counted / counted.sum().clamp(min=1) * self.server_lr / scales
        fallback = torch.where(scales > 0, fallback, scales)
        if server.step.aggregation != "mean":
            if arrivals:
                step = server.average(arrivals)
                model = State(model.layout, model.row + self.server_lr * step.row, (model + step).extras)
            fallback = torch.zeros_like(fallback)  # from there
        elif arrivals:
            model = State(model.layout, model.row, (model + mean(arrivals)).extras)
        start = fallback if self.fallback_start else torch.zeros_like(fallback)
        if head is not None and self.search_epochs:
            location = model.like(model.row + start @ atlas)
            head = await server.fit_head(location, head, epochs=self.head_epochs, lr=self.head_lr)  # Eq. 8
        coefficients, losses = await self._search(server, model, atlas, start, fallback, head)
        return {
            "model": model.like(model.row + coefficients @ atlas),  # Eq. 6
            "anchors": anchors,
            "importance": coefficients.abs().tolist(),
            "head": head,
            "search": {"coefficients": coefficients.tolist(), "fallback": fallback.tolist(), "losses": losses},
        }

    def report(self, state: Message) -> dict[str, Json]:
        return {key: [float(f"{value:.6g}") for value in values] for key, values in state["search"].items()}

    def _add(
        self, server: Server, anchors: list[State], importance: list[float | None], arrivals: list[State]
    ) -> tuple[list[State], list[float | None]]:
        """The atlas with the arrivals, whose importance is None until they were searched, oldest first."""
        size = self.atlas_size or 2 * server.cohort
        anchors, importance = list(anchors), list(importance)
        for arrival in arrivals:
            if len(anchors) == size:
                searched = [(score, location) for location, score in enumerate(importance) if score is not None]
                least = min(searched)[1] if searched and self.importance else 0
                del anchors[least], importance[least]
            anchors.append(arrival)
            importance.append(None)
        return anchors, importance

    async def _search(
        self, server: Server, model: State, atlas: Tensor, start: Tensor, fallback: Tensor, head: State | None
    ) -> tuple[Tensor, list[float]]:
        """The coefficients (M,), and the loss on the server's data at each step of the search (Eq. 10)."""
        coefficients = nn.Parameter(start.clone())
        pull = self.regularization if self.regularization is not None else 0.01 if server.data.foreign else 0.0
        optimizer = torch.optim.Adam([coefficients], lr=self.search_lr)
        losses = []
        for batch in server.batches(epochs=self.search_epochs) if self.search_epochs else []:
            location = coefficients.detach()
            loss, gradient = await server.gradient(model.like(model.row + location @ atlas), batch, head=head)
            losses.append(loss)
            # Eq. 16: no graph goes through the anchors, only the gradient of the merged model is projected on them.
            coefficients.grad = atlas @ gradient.row + pull * (location - fallback)
            optimizer.step()
        return coefficients.detach(), losses


def normalized(anchors: Sequence[State], on: bool = True) -> tuple[Tensor, Tensor]:
    """(atlas, scales): the anchors times their scales (M, P), and these (M,), for the median norm (Eq. 4). An anchor of
    norm 0 has no direction: its scale is 0, and it is not in the median. `on`: whether to normalise; otherwise the
    other scales are 1."""
    norms = torch.tensor([anchor.norm() for anchor in anchors], dtype=anchors[0].row.dtype)
    moving = norms > 0
    scales = moving.to(norms)
    if on and moving.any():
        scales = torch.where(moving, norms[moving].quantile(0.5) / norms, scales)
    return scales[:, None] * stack(anchors), scales
