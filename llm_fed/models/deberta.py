"""DeBERTa's attention (He et al. 2021), for rows that each have adapters of their own.

Its query and key layers also read the table of relative positions, which all rows share. transformers projects that
table once and repeats the result for each row, so a layer that gives each row its own projection does not fit in. Here
the same bias is computed from one projection per row, or from a common one.

Shape letters: N rows, H heads, T tokens, S positions of the table, d numbers of a head.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

# An attribute of inputs (1, T, in) for which each row gets outputs (N, T, out) of its own.
FOR_ALL_ROWS = "for_all_rows"


def with_own_positions(model: nn.Module) -> None:
    """Let each row have its own projection of positions, where they go through the layers that tokens go through."""
    for module in model.modules():
        # By its name, as transformers warns when the class is imported. DeBERTa's first version is another.
        if type(module).__name__ == "DisentangledSelfAttention" and getattr(module, "share_att_key", False):
            module.disentangled_attention_bias = MethodType(_bias, module)  # type: ignore[assignment]


def _bias(
    layer: Any, query: Tensor, key: Tensor, relative: Tensor | None, table: Tensor, scale_factor: int
) -> Tensor | float:
    """What relative positions add to the attention's scores, (N H, T, T): content to position, and position to content
    (Eq. 4 of the paper, of which the first term is computed elsewhere).

    Args:
        query, key: (N H, T, d).
        relative: delta(i, j), as bucket numbers, (T, T) or with dimensions of 1 before it.
        table: (2 S or more, hidden size).
    """
    if relative is None:
        from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

        relative = build_relative_position(
            query, key, bucket_size=layer.position_buckets, max_position=layer.max_relative_positions
        )
    span, heads = layer.pos_ebd_size, layer.num_attention_heads
    delta = relative.reshape(relative.shape[-2:]).to(query.device)
    positions = table[None, : 2 * span]
    setattr(positions, FOR_ALL_ROWS, True)
    scale = float(torch.tensor(query.shape[-1] * scale_factor, dtype=torch.float32).sqrt())  # as transformers rounds it
    bias: Tensor | float = 0.0
    if "c2p" in layer.pos_att_type:
        scores = query @ _by_head(layer.key_proj(positions), heads, len(query)).mT
        bias = bias + scores.gather(-1, _clamped(delta + span, span).expand(len(query), -1, -1)) / scale
    if "p2c" in layer.pos_att_type:
        scores = key @ _by_head(layer.query_proj(positions), heads, len(key)).mT
        bias = bias + scores.gather(-1, _clamped(delta.mT + span, span).expand(len(key), -1, -1)).mT / scale
    return bias


def _by_head(projected: Tensor, heads: int, rows: int) -> Tensor:
    """(N H, 2 S, d) of projections (N, 2 S, H d), or (1, 2 S, H d) that all rows share."""
    apart = projected.unflatten(-1, (heads, -1)).transpose(1, 2)
    return apart.expand(rows // heads, -1, -1, -1).reshape(rows, *apart.shape[2:])


def _clamped(indices: Tensor, span: int) -> Tensor:
    return torch.clamp(indices, 0, 2 * span - 1).long()
