"""Shamir's secret sharing (1979) over the integers modulo 2^255 - 19: the shares are points of a random polynomial
whose value at 0 is the secret. `Crypto.Protocol.SecretSharing` takes 80 times as long, see docs/decisions.md."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping

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
    """The secret of as many shares as the threshold, by point; of others another number. It is Lagrange's polynomial at
    0, over one denominator: points are small, so that is one, and the inverse modulo the prime is what takes time."""
    above = math.prod(shares)
    below = {point: point * math.prod(other - point for other in shares if other != point) for point in shares}
    common = math.lcm(*below.values())
    found = sum(common // below[point] * share for point, share in shares.items())
    return found * above * pow(common, -1, PRIME) % PRIME
