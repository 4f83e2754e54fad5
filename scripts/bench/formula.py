"""What a fused micro-batch keeps for its backward pass, by a formula from shapes: nothing is run, so a model without
weights (on torch's device `meta`) will do.

It holds for decoders of the LLaMA and Qwen kind under plain adapters, computed by torch's fused attention, which keeps
no square of the length. Of other models nothing is predicted; `llm-fed run --dry-run` measures a step of theirs.

Letters: n target tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llm_fed.models.lora import Lora, layout, targets

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # by `model_type`
_FLOAT = 4  # bytes: what norms, the loss and the adapters are computed or kept in
_INDEX = 8  # bytes of a place or a label
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Kept:
    """Bytes that stay until the backward pass has used them.

    Attributes:
        token: for each token, padding included.
        row: for each example, whose adapter is laid beside it.
        target: for each token that counts in the loss.
        position: for each token of the longest example, once for all rows.
        again: for each token, what recomputing one layer keeps for a moment; 0 without activation checkpointing.
        passing: for each token, what the backward pass of one layer holds beside what it was left.
    """

    token: int
    row: int
    target: int
    position: int
    again: int
    passing: int

    def bytes(self, rows: int, length: int, targets: int) -> int:
        """Of a micro-batch of so many rows, padded to `length`, with so many targets in all."""
        return rows * (length * self.token + self.row) + targets * self.target + length * self.position

    def peak(self, rows: int, length: int, targets: int) -> int:
        """The most that is held at once, to some 10 %: in the backward pass through the loss, or through a layer."""
        layer = rows * length * (self.again + self.passing)
        return self.bytes(rows, length, targets) + max(layer, 2 * targets * self.target)


@dataclass(frozen=True)
class Decoder:
    """The shapes that decide what a layer keeps.

    Attributes:
        queries, keys: numbers of a token's queries, and of its keys, over all heads.
        normed: whether each head's queries and keys are normed, as in Qwen3.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    vocabulary: int
    normed: bool

    @classmethod
    def of(cls, model: Any) -> Decoder | None:
        """Those of a causal language model; None if the formula does not hold for it."""
        config = model.config
        if config.model_type not in FAMILIES or config._attn_implementation != "sdpa" or config.hidden_act != "silu":
            return None
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            queries=config.num_attention_heads * head,
            keys=config.num_key_value_heads * head,
            vocabulary=config.vocab_size,
            normed=config.model_type == "qwen3",
        )

    @property
    def width(self) -> int:
        """Of one head."""
        return self.queries // self.heads


def kept(model: Any, structure: Lora, autocast: torch.dtype | None, checkpointing: bool) -> Kept | None:
    """What training adapters of a structure keeps, per token, row and target.

    Args:
        model: a causal language model, quantised to 4 bits or of any float dtype.
        autocast: what it computes in; None: its own dtype, which then is float32.
        checkpointing: whether layers are recomputed in the backward pass.

    Returns:
        None where the formula does not hold: another family or attention, several experts, an adapted head.
    """
    decoder = Decoder.of(model)
    if decoder is None or not structure.plain or structure.gate != "sum" or structure.delta:
        return None
    adapted: list[dict[str, nn.Module]] = [{} for _ in range(decoder.layers)]
    for name, module in targets(model, structure).items():
        place = name.split(".")
        if "layers" not in place or type(module).__name__ == "Linear8bitLt":
            return None
        adapted[int(place[place.index("layers") + 1])][place[-1]] = module
    size = _FLOAT if autocast is None else torch.empty((), dtype=autocast).element_size()
    token, again, flows = 0, 0, False  # flows: whether the stream depends on an adapter by now
    row = _FLOAT * layout(model, structure).size
    masks = bool(structure.dropout) * sum(_inputs(module) for own in adapted for module in own.values())
    for own in adapted:
        inner, casts = _layer(decoder, own, flows, structure, size)
        token += size * decoder.hidden if checkpointing else inner
        row += 0 if checkpointing or autocast is None else casts
        again = max(again, inner)
        flows = flows or bool(own)
    return Kept(
        token=token + masks + _norm(decoder.hidden),
        row=row,
        target=_FLOAT * (decoder.vocabulary + 1) + 2 * _INDEX,
        position=2 * size * decoder.width,
        again=again if checkpointing else 0,
        passing=3 * size * decoder.intermediate,  # gradients of the gate, of its activation and of what is beside it
    )


def cache(model: Any, size: int) -> int | None:
    """Bytes that the keys and values of one token take while an answer is written; None as of `kept`.

    Args:
        size: bytes of a number that the model computes with.
    """
    decoder = Decoder.of(model)
    return None if decoder is None else 2 * decoder.layers * decoder.keys * size


def _inputs(module: Any) -> int:
    return module.in_features


def _norm(width: int, groups: int = 1) -> int:
    """Of a norm over groups of a token's numbers: its inputs and a factor for each group, in float32."""
    return _FLOAT * (width + groups)


def _layer(shapes: Decoder, adapted: dict[str, Any], flows: bool, structure: Lora, size: int) -> tuple[int, int]:
    """What a layer keeps of a token, and of a row where adapters are cast.

    Args:
        flows: whether what the layer reads depends on an adapter, and so has a gradient.
        size: bytes of a number.
    """

    def among(names: Collection[str]) -> bool:
        return any(name in adapted for name in names)

    def read(names: Collection[str], width: int) -> int:
        """The inputs of adapters: one tensor for all, or with dropout one for each."""
        count = sum(name in adapted for name in names)
        return size * width * (count if structure.dropout else min(count, 1))

    hidden, inner = shapes.hidden, shapes.intermediate
    attention = flows or among(_ATTENTION)  # whether its inputs have a gradient
    after = attention or "o_proj" in adapted
    token = read(_ATTENTION, hidden) + read(_MLP, hidden) + read(["down_proj"], inner)
    token += size * structure.rank * len(adapted)  # A x of each adapter
    if flows:
        token += _norm(hidden)
    if shapes.normed:
        token += _norm(shapes.queries, shapes.heads) * (flows or "q_proj" in adapted)
        token += _norm(shapes.keys, shapes.key_heads) * (flows or "k_proj" in adapted)
    if attention:  # queries, keys, values, the result, and a normaliser for each head
        token += size * 2 * (shapes.queries + shapes.keys) + _FLOAT * shapes.heads
    if structure.dropout or not attention:  # else its input is the result that attention keeps
        token += read(["o_proj"], shapes.queries)
    if after:
        token += _norm(hidden)
    gate, up = after or "gate_proj" in adapted, after or "up_proj" in adapted
    token += size * inner * (2 * gate + up)  # of silu(gate) * up: gate; silu(gate) for up; up for gate
    casts = 0
    moves = {**dict.fromkeys(_ATTENTION, flows), "o_proj": attention, **dict.fromkeys(_MLP, after),
             "down_proj": gate or up}  # fmt: skip
    for name, module in adapted.items():
        casts += size * structure.rank * (module.out_features + moves[name] * module.in_features)
    return token, casts
