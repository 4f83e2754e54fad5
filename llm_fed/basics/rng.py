"""Random draws of a run: each has a seed of its own, derived from what it is for and never from call order. What hides
data is drawn from a secret."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from dataclasses import dataclass, field

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for (seed, parts): equal ones give equal seeds on every machine, different ones independent seeds.

    >>> derive(0, "cohort", 3) == derive(0, "cohort", 3) != derive(0, "cohort", 4)
    True
    """
    return int.from_bytes(hashlib.sha256(_named(seed, *parts)).digest()[:8], "little") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A CPU generator seeded with `derive(seed, *parts)`; draw on the CPU so that a GPU run sees the same numbers."""
    return torch.Generator().manual_seed(derive(seed, *parts))


@dataclass(frozen=True)
class Secret:
    """256 bits from which everything is drawn that hides data; whoever knows them can subtract the noise.

    The numbers are the stream of AES-256 in counter mode (NIST SP 800-38A) under a key of their own: the HMAC-SHA256 of
    what they are for. No generator of torch draws them: that of the CPU keeps 32 bits of its seed.
    """

    key: str = field(repr=False)  # 64 hexadecimal digits

    @classmethod
    def fresh(cls) -> Secret:
        return cls(secrets.token_hex(32))

    @property
    def mark(self) -> str:
        """By which the same secret is known again, and from which it cannot be found."""
        return hashlib.sha256(bytes.fromhex(self.key)).hexdigest()[:16]

    def of(self, *parts: str | int) -> Secret:
        """The secret of one purpose; equal for equal parts, and nothing follows from it for others."""
        return Secret(hmac.digest(bytes.fromhex(self.key), _named(*parts), "sha256").hex())

    def uniforms(self, count: int, *parts: str | int) -> torch.Tensor:
        """(count,) multiples of 2^-53 above 0 and up to 1, in float64."""
        cipher = Cipher(algorithms.AES(bytes.fromhex(self.of(*parts).key)), modes.CTR(bytes(16)))
        stream = bytearray(8 * count + 15)
        cipher.encryptor().update_into(bytes(8 * count), stream)
        words = torch.frombuffer(stream, dtype=torch.int64, count=count) if count else torch.zeros(0, dtype=torch.int64)
        return ((words & (2**53 - 1)) + 1).double().mul_(2.0**-53)

    def gaussians(self, count: int, *parts: str | int) -> torch.Tensor:
        """(count,) standard normal numbers in float64, by Box and Muller (1958); none is beyond 8.6."""
        pairs = (count + 1) // 2
        radii, turns = self.uniforms(2 * pairs, *parts).view(2, pairs).unbind()
        radii, angles = radii.log().mul_(-2).sqrt_(), turns * (2 * math.pi)
        return torch.cat([radii * angles.cos(), radii * angles.sin()])[:count]


def _named(*parts: str | int) -> bytes:
    return "\x1f".join(f"{type(part).__name__}:{part}" for part in parts).encode()
