"""Attention masks without waiting for the device: what transformers would look up in tensors is known beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import masking_utils
from transformers.utils import import_utils

# Looked up once, so that two threads cannot leave each other's in place.
_PACKED, _NEEDLESS = masking_utils.find_packed_sequence_indices, masking_utils._ignore_causal_mask_sdpa


@contextmanager
def known_masks(padded: bool = False) -> Iterator[None]:
    """Within, each row that a model is given is one sequence, and the mask that may come with it is all ones unless
    `padded`. Transformers would find out both from the tensors, and while it does the host waits for all that a GPU was
    asked for, once or twice in every forward pass."""

    def needless(mask: Tensor | None, *sizes: Any, **more: Any) -> bool:
        return not (padded and mask is not None) and _NEEDLESS(None, *sizes, **more)

    try:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        masking_utils._ignore_causal_mask_sdpa = needless  # type: ignore[assignment]
        yield
    finally:
        masking_utils.find_packed_sequence_indices, masking_utils._ignore_causal_mask_sdpa = _PACKED, _NEEDLESS


@contextmanager
def not_captured() -> Iterator[None]:
    """Within, transformers does not notice that a stream is captured. It would keep an explicit causal mask then, with
    which attention rounds otherwise. What it looks up in tensors ends the capture with an error."""
    original = import_utils.is_cuda_stream_capturing
    try:
        import_utils.is_cuda_stream_capturing = lambda: False
        yield
    finally:
        import_utils.is_cuda_stream_capturing = original
