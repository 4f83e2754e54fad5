"""Attention masks without waiting for the device: what transformers would look up in tensors is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

_PACKED, _NEEDLESS = "find_packed_sequence_indices", "_ignore_causal_mask_sdpa"  # both in transformers.masking_utils


@contextmanager
def known_masks(padded: bool = False) -> Iterator[None]:
    """Within, each row that a model is given is one sequence, and the mask that may come with it is all ones unless
    `padded`.

    Transformers would find out both from the tensors, and while it does the host waits for all that a GPU was asked
    for, once or twice in every forward pass. A version of it that looks elsewhere waits as before.
    """
    from transformers import masking_utils

    originals = _originals()

    def needless(mask: Tensor | None, *sizes: Any, **more: Any) -> bool:
        return not (padded and mask is not None) and bool(originals[_NEEDLESS](None, *sizes, **more))

    known: dict[str, Callable[..., Any]] = {_PACKED: lambda position_ids: None, _NEEDLESS: needless}
    try:
        for name in originals:
            setattr(masking_utils, name, known[name])
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)


@contextmanager
def not_captured() -> Iterator[None]:
    """Within, transformers does not notice that a stream is captured. It would keep an explicit causal mask then, with
    which attention rounds otherwise. What it looks up in tensors ends the capture with an error."""
    from transformers.utils import import_utils

    name = "is_cuda_stream_capturing"  # newer versions alone have it
    original = getattr(import_utils, name, None)
    if original is None:
        yield
        return
    try:
        setattr(import_utils, name, lambda: False)
        yield
    finally:
        setattr(import_utils, name, original)


@cache
def _originals() -> dict[str, Callable[..., Any]]:
    """Looked up once, so that two threads cannot leave each other's in place."""
    from transformers import masking_utils

    return {name: getattr(masking_utils, name) for name in (_PACKED, _NEEDLESS) if hasattr(masking_utils, name)}
