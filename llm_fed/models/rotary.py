"""Rotary embeddings whose frequencies depend on the length of a text: each row of a pass has those that it has alone.

LongRoPE (Phi-3, Phi-4) has other frequencies for texts beyond a border, and dynamic NTK has others for every length
beyond it. Transformers looks at the longest row of a pass, and with dynamic NTK also at earlier passes. Here every row
is rotated by the model's own code as if it were alone.

Shape letters: N rows of a pass, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

# Their own generation reads a text again when it crosses the border; others keep what they know of its beginning.
_READ_AGAIN = ("phi3", "phimoe", "phi4_multimodal")


@dataclass(frozen=True)
class Regimes:
    """Which lengths of a text share frequencies.

    Attributes:
        border: most tokens of a text with the ordinary frequencies.
        each: whether each length beyond the border has frequencies of its own (dynamic NTK), or all have the same.
        read_again: whether a text whose answer crosses the border is read again, as in the model's own generation.
    """

    border: int
    each: bool
    read_again: bool = False

    def of(self, length: int) -> int:
        """Equal for lengths that share frequencies."""
        return max(length, self.border) if self.each else self.border + (length > self.border)


_known: WeakKeyDictionary[nn.Module, Regimes | None] = WeakKeyDictionary()


def regimes(model: nn.Module) -> Regimes | None:
    """How frequencies depend on lengths, None if they do not. From the first call on, the model's rotary embeddings
    treat each row by itself."""
    if model not in _known:
        modules = [module for module in model.modules() if _types(module)]
        for module in modules:
            _treat_rows_alone(module)
        of = [_regimes_of(module, kind, layer) for module in modules for layer, kind in _types(module).items()]
        again = isinstance(model, PreTrainedModel) and model.config.get_text_config().model_type in _READ_AGAIN
        # Of layers that differ, lengths share frequencies where they do in all of them.
        _known[model] = Regimes(min(r.border for r in of), any(r.each for r in of), again) if of else None
    return _known[model]


def context(config: PretrainedConfig) -> int | None:
    """How many tokens a model of this configuration reads; None if it does not say. Dynamic NTK is there for texts of
    up to `factor` times what the model was trained with."""
    config = config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in (parameters, *parameters.values()) if isinstance(each, dict)]  # of layers, in some
    longer = max([1, *(each.get("factor") or 1 for each in kinds if each.get("rope_type") == "dynamic")])
    return None if length is None else int(length * longer)


def row_positions(lengths: Tensor, width: int) -> Tensor:
    """Positions (N, T) of rows that are padded on the right; padding has the last one, so that it makes no row longer.
    `lengths`: (N,) tokens of each row."""
    return torch.minimum(torch.arange(width, device=lengths.device), lengths[:, None] - 1)


def _types(module: nn.Module) -> dict[str | None, str]:
    """By type of layer (None: all layers) the kind of RoPE whose frequencies depend on the length."""
    kinds = getattr(module, "rope_type", None)
    types: dict[str | None, Any] = dict(kinds) if isinstance(kinds, dict) else {None: kinds}
    return {layer: kind for layer, kind in types.items() if kind == "longrope" or "dynamic" in (kind or "")}


def _regimes_of(module: Any, kind: str, layer: str | None) -> Regimes:
    if kind != "longrope":
        return Regimes(int(module.original_max_seq_len), True)
    parameters = module.config.rope_parameters
    return Regimes((parameters if layer is None else parameters[layer])["original_max_position_embeddings"], False)


class _RowsAlone(nn.Module):
    """A rotary embedding, class by class a subclass of the model's own, that calls it once for each group of rows."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = kwargs.get("layer_type", args[0] if args else None)
        kind = _types(self).get(layer)
        if kind is None:
            return super().forward(x, position_ids, *args, **kwargs)  # type: ignore[misc]
        regimes = _regimes_of(self, kind, layer)
        rows = position_ids.ndim - 2  # before it may stand kinds of positions, as of pictures
        longest = position_ids.movedim(rows, 0).flatten(1).amax(1) + 1
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(longest.tolist()):
            groups.setdefault(regimes.of(length), []).append(row)
        parts = []
        for chosen in groups.values():
            if regimes.each:  # undo what dynamic NTK remembers of longer texts
                prefix = "" if layer is None else f"{layer}_"
                setattr(self, f"{prefix}inv_freq", self.get_buffer(f"{prefix}original_inv_freq"))
                setattr(self, f"{prefix}max_seq_len_cached", self.original_max_seq_len)
            indices = position_ids
            if len(groups) > 1:
                indices = position_ids.index_select(rows, torch.tensor(chosen, device=position_ids.device))
            parts.append(super().forward(x, indices, *args, **kwargs))  # type: ignore[misc]
        if len(parts) == 1:
            return parts[0]
        back = torch.tensor([row for chosen in groups.values() for row in chosen], device=x.device).argsort()
        if isinstance(parts[0], Tensor):
            return _in_order(parts, back)
        return tuple(_in_order(part, back) for part in zip(*parts, strict=True))


def _in_order(parts: Any, back: Tensor) -> Tensor:
    """The groups' values, (N, T, ...) or with more before them, as rows of the pass."""
    return torch.cat(tuple(parts), dim=-3).index_select(-3, back)


def _treat_rows_alone(module: Any) -> None:
    if isinstance(module, _RowsAlone):
        return
    original = type(module)
    module.__class__ = type(original.__name__, (_RowsAlone, original), {})
    if "_old_forward" in vars(module):  # accelerate's device hooks call it
        module._old_forward = MethodType(type(module).forward, module)
