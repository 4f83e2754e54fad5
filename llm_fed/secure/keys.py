"""What two clients agree on that the server cannot read: X25519, HKDF-SHA256, AES-256 in counter and Galois mode, and
ECDSA over the keys under which nodes are registered; all of the library cryptography.

Secrets are shared as Shamir (1979) does, over the integers modulo 2^255 - 19: the shares are points of a random
polynomial whose value at 0 is the secret. `Crypto.Protocol.SecretSharing` takes 80 times as long, see
docs/decisions.md.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

PRIME = 2**255 - 19
_BLOCK = 2**15  # numbers of a stream that are drawn at once: with those that they are added to, in the cache of a core
_ZEROS = bytes(4 * _BLOCK)
_NONCE = 12


class Unsafe(ValueError):
    """What a client is asked would tell somebody what it must not, or does not come from whom it should. `code`: one
    word, which the server may know."""

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code


def private_of(secret: int) -> bytes:
    """The key of X25519 that belongs to a shared secret."""
    return hashlib.sha256(b"x25519" + secret.to_bytes(32)).digest()


def public_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def derived(secret: bytes, purpose: bytes) -> bytes:
    """32 bytes for one purpose."""
    return HKDF(hashes.SHA256(), 32, None, purpose).derive(secret)


def agreed(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The key of two clients for a purpose, of one's private and the other's public key. Unsafe: it is none."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Unsafe("keys", f"a public key is none: {error}") from error
    return derived(shared, purpose)


def seal(key: bytes, text: bytes) -> bytes:
    nonce = secrets.token_bytes(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Raises: Unsafe: it was sealed with another key, or changed."""
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], None)
    except (InvalidTag, ValueError) as error:
        raise Unsafe("sealed", "what was sealed for this client is damaged, or of somebody else") from error


def sign(identity: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    return identity.sign(text, ec.ECDSA(hashes.SHA256()))


def is_signed(identity: ec.EllipticCurvePublicKey, text: bytes, signature: bytes) -> bool:
    try:
        identity.verify(signature, text, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def add_streams(total: Tensor, signed: Iterable[tuple[bytes, int]]) -> None:
    """Add the stream of each key to (P,) int32 modulo 2^32, or subtract it (sign -1): AES-256 in counter mode from 0,
    of which each key has one. All streams of a part come one after another, as the part then stays in the cache."""
    numbers, buffer = total.numpy(), bytearray(4 * _BLOCK + 15)
    drawn = np.frombuffer(buffer, np.int32, _BLOCK)
    streams = [(Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor(), sign) for key, sign in signed]
    for start in range(0, len(numbers), _BLOCK):
        part = numbers[start : start + _BLOCK]
        for encryptor, sign in streams:
            encryptor.update_into(memoryview(_ZEROS)[: part.nbytes], buffer)
            (np.add if sign > 0 else np.subtract)(part, drawn[: len(part)], out=part)


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
