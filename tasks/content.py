"""When two rows are the same row, whatever file they stand in: 64 bits of what they say, and draws from these."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

_PARTS, _TEXTS = "\x1d", "\x1f"  # between the parts of a row, and between the texts of a part: `plain` leaves none
_WHOLE = 2**64  # of how many numbers one is drawn


def plain(text: str) -> str:
    """A text without what copying and editing programs change: normal form, letter case and white space."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def of_texts(prompt: Sequence[str], answers: Iterable[str], options: Iterable[str]) -> int:
    """The digest of a row of text. The options count in any order, as many data sets shuffle them. `prompt`: one text,
    or role and content of each message in turn."""
    if len(prompt) == 2 and prompt[0] == "user":  # the same question as a conversation of one message
        prompt = prompt[1:]
    parts = (map(plain, prompt), map(plain, answers), sorted(map(plain, options)))
    return _digest(_PARTS.join(_TEXTS.join(part) for part in parts).encode("utf-8", "surrogatepass"))


def of_pixels(pixels: torch.Tensor) -> int:
    """The digest of a picture, whatever its label."""
    return _digest(repr(tuple(pixels.shape)).encode() + pixels.cpu().contiguous().numpy().tobytes())


def digests(items: Sequence[Any]) -> np.ndarray:
    """(N,) uint64, of examples or pictures."""
    known = getattr(items, "digests", None)  # of those on the disk
    return np.fromiter((item.digest for item in items), np.uint64, len(items)) if known is None else known


def drawn(rows: np.ndarray, seed: int) -> np.ndarray:
    """(N,) uint64: a number for each digest, uniform over all 64 bits, the same for equal digests and seeds. The
    finaliser of SplitMix64 (Steele et al. 2014), which passes for random where what goes in is a digest."""
    mixed = rows ^ np.uint64(seed % _WHOLE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def below(draws: np.ndarray, share: float) -> np.ndarray:
    """(N,) bool: which numbers of `drawn` belong to that share, at least 0 and below 1, of all there are."""
    return draws < np.uint64(share * _WHOLE)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
