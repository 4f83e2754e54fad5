"""Shamir's secret sharing (1979) over the integers modulo 2^255 - 19: the shares are points of a random polynomial
whose value at 0 is the secret. `Crypto.Protocol.SecretSharing` takes 80 times as long, see docs/decisions.md."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import lru_cache

PRIME = 2**255 - 19


def fresh() -> int:
    """A random secret."""
    return secrets.randbelow(PRIME)


def split(secret: int, number: int, threshold: int) -> list[int]:
    """The shares of points 1 to `number`, of which any `threshold` give the secret, and fewer say nothing of it."""
    rest = [fresh() for _ in range(threshold - 1)]

    def at(point: int) -> int:
        value = 0
        for factor in rest:
            value = (value + factor) * point % PRIME
        return (value + secret) % PRIME

    return [at(point) for point in range(1, number + 1)]


def combine(shares: Mapping[int, int]) -> int:
    """The secret of as many shares as the threshold, by point; of others another number."""
    points = tuple(sorted(shares))
    return sum(weight * shares[point] for point, weight in zip(points, _weights(points), strict=True)) % PRIME


@lru_cache(maxsize=4096)
def _weights(points: tuple[int, ...]) -> list[int]:
    """Lagrange's, for the value at 0."""
    weights = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
