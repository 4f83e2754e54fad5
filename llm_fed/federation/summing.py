"""Sums of a round's uploads through which nobody sees (`privacy.secure`): for which runs they are, and of what.

An upload's numbers become whole ones modulo 2^32 (`Ring`): clipped, weighed and rounded by the client. In a simulation
they are added as they are, over a network under masks (`network.summed`), and both give the same sum. What the method's
server step is given as the upload of each client is the mean of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_fed.basics.errors import ClientError, UserError, refuse
from llm_fed.basics.rng import Secret
from llm_fed.federation.privacy import clipped, protected
from llm_fed.method import Message, Method
from llm_fed.secure.cohort import LEAST, Cohort
from llm_fed.secure.keys import add_streams
from llm_fed.settings.config import Config, PrivacyConfig
from llm_fed.state import State
from llm_fed.state.outline import infinite, leaves, mapped

LEAST_BITS = 15  # of a number beside its sign, with the largest cohort
MOST_CLIENTS = (2**31 - 1) >> LEAST_BITS
_INSTEAD = (
    "set it to false, or choose a method whose server needs their mean: fedit, fedprox, fedavgm, ffa, rolora and "
    "fedsvd have one model for all, fedlora, ditto and fedsa personal ones, and feddyn and scaffold correct for unlike "
    "data"
)


@dataclass(frozen=True)
class Ring:
    """Fixed-point numbers from -`bound` to `bound` of so many clients: `levels` steps on each side of 0."""

    clients: int
    bound: float

    @property
    def levels(self) -> int:
        return (2**31 - 1) // self.clients

    @property
    def step(self) -> float:
        return self.bound / self.levels

    def encode(self, vector: Tensor, key: bytes) -> Tensor:
        """(P,) int32: each number rounded up or down at random, so that the mean is its own. `vector`: (P,), none of
        whose numbers is beyond the bound. `key`: 32 bytes, from which the rounding is drawn."""
        draws = torch.zeros(len(vector), dtype=torch.int32)
        add_streams(draws, [(key, 1)])
        scaled = draws.double().add_(2.0**31).mul_(2.0**-32)  # in [0, 1)
        scaled.add_(vector.double(), alpha=1 / self.step).floor_()
        return scaled.clamp_(-self.levels, self.levels).to(torch.int32)

    def decode(self, total: Tensor) -> Tensor:
        """(P,) float64: the sum that such vectors add up to."""
        return total.double().mul_(self.step)


class RoundGivenUp(ClientError):
    """Too few clients have answered, so the sum stays closed, and nobody's answer counts."""


def summed(method: Method) -> str | None:
    """By what the mean that the server's step needs is weighed; None where it needs single uploads."""
    return method.summed or ("examples" if method.mean_only else None)


def check(config: Config, method: Method) -> None:
    """UserError: a run with `privacy.secure` needs more than sums; what to do."""
    private, name = config.privacy, config.method["name"]
    unlike = {
        f" is for methods with rounds, but {name} merges finished runs; train these with it, and give them to `llm-fed "
        "merge`": bool(method.parents),
        f" shows the server the sum of a round's updates, but {name} needs each of them; {_INSTEAD}":
            summed(method) is None,
    }  # fmt: skip
    odd = {
        f"server.aggregation={config.server.aggregation} compares single uploads; set it to mean":
            config.server.aggregation != "mean",
        f"transport={config.transport} compresses uploads, which are masked numbers of 32 bits; leave it out":
            config.transport is not None,
        "delay.sigma makes answers late, and a sum is of one round; set it to 0": config.delay.sigma > 0,
        "network.enough ends a round before all have answered; leave it out, and set network.deadline":
            config.network.enough is not None,
        "privacy.where=client adds the noise of a whole sum to every upload; set privacy.where=server":
            private.clip is not None and not private.central and not private.by_example,
        "every client is told who takes part in a round, and the epsilon of privacy.where=server is that of a sample "
        "that nobody knows; set participation=1": private.central and config.participation < 1,
    }  # fmt: skip
    refuse(unlike, "privacy.secure")
    refuse(odd, "privacy.secure: ")


def check_cohort(cohort: int) -> None:
    """Refuse cohorts of which no sum can be made. UserError: how many clients there may be in a round."""
    if not LEAST <= cohort <= MOST_CLIENTS:
        raise UserError(
            f"privacy.secure adds up {LEAST} to {MOST_CLIENTS:,} clients in a round, and {cohort:,} are asked: of a "
            f"sum of two each knows the other's part, and of more a number would have fewer than {LEAST_BITS} bits; "
            "change participation, or have other clients"
        )


def check_upload(like: Message, name: str) -> None:
    """Refuse a method whose uploads hold anything but rows of parameters. UserError: what they hold."""
    for path, leaf in leaves(like):
        if not isinstance(leaf, State) or leaf.extras:
            held = "running statistics" if isinstance(leaf, State) else f"{path} ({type(leaf).__name__})"
            other = "; fedbn and lg-fedavg keep them at the clients" if isinstance(leaf, State) else ""
            raise UserError(
                f"privacy.secure is for uploads of parameters, but those of {name} hold {held}; {_INSTEAD}{other}"
            )


def ring_of(private: PrivacyConfig, cohort: int) -> Ring:
    """In which uploads are added up; with noise at the server, `privacy.clip` is the bound."""
    return Ring(cohort, private.clip if private.central and private.clip is not None else private.bound)


def numbers(upload: Message, private: PrivacyConfig, ring: Ring, share: float, key: bytes) -> Tensor:
    """(P,) int32: the client's part of a sum. `share`: the client's weight as a share of the largest one. `key`: from
    which rounding is drawn."""
    states = [leaf for _, leaf in leaves(upload)]
    size = sum(state.layout.size for state in states)
    # Rounding must not make an upload longer than the clip that epsilon counts on.
    reach = ring.bound - ring.step * math.sqrt(size) if private.central else ring.bound
    return ring.encode(share * torch.cat([clipped(state, reach).row.double() for state in states]), key)


def too_long(upload: Message, private: PrivacyConfig) -> str:
    """That an upload is cut to `privacy.bound`, in words; empty where it is not."""
    norm = max(leaf.norm() for _, leaf in leaves(upload))
    if private.central or norm <= private.bound:
        return ""
    return f"its update has norm {norm:.3g}, and counts with privacy.bound={private.bound:g}; set a larger one"


def mean_of(total: Tensor, ring: Ring, like: Message, weights: Sequence[int], largest: int) -> Message:
    """The mean upload, from the sum of the clients' parts.

    Args:
        like: an upload.
        weights: of those whose sum it is.
        largest: with which a client may count.
    """
    row, start = ring.decode(total).mul_(largest / sum(weights)), 0

    def part(leaf: State) -> State:
        nonlocal start
        start += leaf.layout.size
        return leaf.like(row[start - leaf.layout.size : start].to(leaf.row.dtype))

    return mapped(like, part)


def together(
    answers: Mapping[str, Message | Exception], examples: Mapping[str, int], requested: Sequence[str], config: Config,
    method: Method, secret: Secret, round: int,
) -> tuple[dict[str, Message | Exception], dict[str, str]]:  # fmt: skip
    """By client, instead of its answer, the mean of all answers of a round, or what ended it; and whose were too long.

    Args:
        examples: the number with which each client is weighed.
        requested: the whole cohort, with those that have vanished.
        secret: of rounding.
    """
    private, name = config.privacy, config.method["name"]
    outcomes, uploads, long = dict(answers), {}, {}
    for client, answer in answers.items():
        if isinstance(answer, Exception):
            continue
        check_upload(answer, name)
        if infinite(answer, "upload"):
            outcomes[client] = ClientError("its update holds NaN or infinite values")
            continue
        uploads[client] = protected(answer, private, secret, round, client)
        if said := too_long(uploads[client], private):
            long[client] = said
    if why := Cohort("", round, round, tuple(requested)).lacking([*uploads]):
        return outcomes | dict.fromkeys(uploads, RoundGivenUp(f"the round is given up: {why}")), long
    weights = {client: examples[client] if summed(method) == "examples" else 1 for client in uploads}
    ring, largest = ring_of(private, len(requested)), max(weights.values())
    parts = (
        numbers(upload, private, ring, weights[client] / largest, rounding_key(secret, round, client))
        for client, upload in uploads.items()
    )
    total = sum((part.long() for part in parts), torch.zeros(1, dtype=torch.long))
    like = next(iter(uploads.values()))
    return outcomes | dict.fromkeys(uploads, mean_of(total, ring, like, [*weights.values()], largest)), long


def rounding_key(secret: Secret, round: int, client: str) -> bytes:
    return bytes.fromhex(secret.of("rounding", round, client).key)
