"""Collector: what the server's step sees of a round, made of the uploads that arrived. It is the same in simulations,
networks and audits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from llm_fed.basics.rng import Secret
from llm_fed.federation.privacy import central, clipped, noised
from llm_fed.method import Message, Method, Upload
from llm_fed.settings.config import Config


class Collector(Protocol):
    """Stands between the arrivals of a round and `Method.server_update`."""

    def collect(self, method: Method, state: Message, uploads: list[Upload], round: int) -> list[Upload]:
        """What the step on `state` is given instead of these uploads."""


class EachUpload:
    """The uploads as they are."""

    def collect(self, method: Method, state: Message, uploads: list[Upload], round: int) -> list[Upload]:
        return uploads


@dataclass(frozen=True)
class NoisySum:
    """The noisy mean of what arrived in a round, perhaps nothing, as one upload (`privacy.where=server`).

    The sum is divided by the mean size of a cohort, however many arrived. Uploads are clipped here too, since
    compression (`transport.up`), or a client, may have made them longer.

    Args:
        clients: who is registered.
        secret: of the noise.
    """

    config: Config
    clients: Sequence[str]
    secret: Secret

    def collect(self, method: Method, state: Message, uploads: list[Upload], round: int) -> list[Upload]:
        privacy, like = self.config.privacy, method.upload_like(method.broadcast(state, self.clients[0]))
        assert privacy.clip is not None  # see `collector_of`
        total = torch.zeros(like.layout.size, dtype=torch.float64)
        for upload in uploads:
            total += clipped(upload.content, privacy.clip).row
        row = noised(total, privacy.noise * privacy.clip, self.secret.of("noise of the server", round))
        mean = row / (self.config.participation * len(self.clients))
        return [Upload("cohort", 1, 0, like.like(mean.to(like.row.dtype)))]


def collector_of(config: Config, clients: Sequence[str], secret: Secret) -> Collector:
    """The collector of a run.

    Args:
        clients: who is registered.
        secret: of noise.
    """
    if not central(config.privacy):
        return EachUpload()
    return NoisySum(config, clients, secret)
