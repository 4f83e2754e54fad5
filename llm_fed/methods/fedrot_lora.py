"""FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA (Zhang, Kim, Cha, Vikalo; ICML 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from llm_fed.merge.products import layers
from llm_fed.method import Client, Message, Method, State
from llm_fed.settings import AtLeast, AtMost


@dataclass(frozen=True)
class FedRotLoRA(Method):
    """FedIT whose clients rotate their adapters before they send them: (B R)(R^T A) is the same product for any
    rotation R, and each client takes the R that brings its factors closest to those it was sent, so that less is lost
    in the mean.

    In even rounds R aligns A, in odd rounds B; in the first round nothing is rotated, as B is zero. What is sent, and
    its size, are as in FedIT. The formulas are those of the authors' code (`rotation_alignment_tools.py`).
    """

    paper: ClassVar[str] = "FedRot-LoRA (Zhang et al. 2026)"
    one_model: ClassVar[bool] = True
    mean_only: ClassVar[bool] = True
    adapters_only: ClassVar[bool] = True

    # lambda: how far to turn; 1: to the best rotation, 0: not at all
    rotation: Annotated[float, AtLeast(0), AtMost(1)] = 1.0

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = await client.fit(message)
        if client.round > 1:
            theta = turned(theta, message, by_a=client.round % 2 == 0, share=self.rotation)
        return theta - message


def turned(theta: State, reference: State, *, by_a: bool, share: float = 1.0) -> State:
    """`theta` with B R and R^T A on each layer, where the rotation R (r, r) brings A (else B) closest to the
    reference's; with a smaller `share` the rotation closest to (1 - share) I + share R.

    R = U V of the singular value decomposition U S V of A A_ref^T, or of B^T B_ref (Procrustes), where a reflection
    becomes a rotation by the sign of the last singular vector.
    """
    entries = theta.tensors()
    for _, a, b in layers(theta):
        wide, tall = theta[a].double(), theta[b].double()
        matched = wide @ reference[a].double().T if by_a else tall.T @ reference[b].double()
        r = _rotation(matched)
        if share < 1:
            r = _rotation((1 - share) * torch.eye(len(r), dtype=r.dtype, device=r.device) + share * r)
        entries[a], entries[b] = (r.T @ wide).to(theta.row), (tall @ r).to(theta.row)
    return State.of({name: entries[name] for name in theta})


def _rotation(matched: Tensor) -> Tensor:
    """The rotation R with the largest trace of R^T M."""
    u, _, v = torch.linalg.svd(matched)
    if torch.linalg.det(u @ v) < 0:
        v = torch.cat([v[:-1], -v[-1:]])
    return u @ v
