"""Examples as the fused loops see them: what they cost, how they lie side by side, and which loss they have. `Text` are
those of a causal language model, whose loss is had on a CPU without all logits (`LastLayer`); other kinds are in
`llm_fed/kinds`.

Shape letters: N rows, T tokens, n targets, C classes or words of the vocabulary V, H width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import Field, dataclass, field, replace
from typing import ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm_fed.basics.errors import UserError
from llm_fed.engine.end_to_end import FlatBatch
from llm_fed.engine.layers import forwards
from llm_fed.engine.masks import known_masks
from llm_fed.engine.packing import MicroBatch, TokenSequence, collate, num_targets
from llm_fed.method.losses import divergence, head_losses
from llm_fed.method.requests import Item
from llm_fed.models.joined import Answer, full
from llm_fed.models.rotary import regimes, row_positions
from llm_fed.state import State

_CHANGES_LOGITS: WeakSet[nn.Module] = WeakSet()  # models that change what their last layer gives, by a scale for one


@dataclass
class LastLayer:
    """The last layer of a model, which is not computed: a stand-in takes the place of the logits. `inputs`: (1, n, H)
    what the layer was given. `stand_in`: (1, n, V) of the layer's output, which has no memory."""

    layer: nn.Linear
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    stand_in: Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(self, inputs: Tensor) -> Tensor:
        weight = self.layer.weight
        self.inputs = inputs
        self.stand_in = weight.new_empty(()).expand(*inputs.shape[:-1], len(weight))
        return self.stand_in


def last_layer(model: PreTrainedModel) -> LastLayer | None:
    """The last layer, where losses can be computed from its inputs: it is linear, frozen, on a CPU, computes in its own
    dtype, and nobody listens to it; None elsewhere."""
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or model in _CHANGES_LOGITS:
        return None
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else layer.weight.dtype
    if layer.weight.requires_grad or layer.weight.dtype != autocast:
        return None
    # Hooks would hear of the stand-in, and accelerate replaces the forward where weights are somewhere else.
    return None if layer._forward_hooks or "forward" in vars(layer) else LastLayer(layer)


class Batch(Protocol):
    """Examples side by side: a dataclass whose fields are tensors on the CPU (`on_device` moves them)."""

    __dataclass_fields__: ClassVar[dict[str, Field]]

    @property
    def labels(self) -> Tensor: ...  # what is to be predicted

    @property
    def rows(self) -> Tensor: ...  # (n,) the example of each loss


TextBatch: TypeAlias = MicroBatch | FlatBatch
Side = TypeVar("Side", bound=Batch)  # several side by side


class Examples(ABC, Generic[Item, Side]):
    """What the engine must know of a kind of examples.

    Attributes:
        single: whether an example is one target, so that logits of all examples can be kept.
        each: how many rows of a batch an example is, one behind the other.
        drifts: whether the losses of a client's batch depend on how far its model is from a reference.
        replaceable: whether a method's own loss of logits can take the place of theirs.
        fixed: whether a batch is a `MicroBatch`, which can be widened to a shape of a grid, and examples can lie end to
            end (`end_to_end.FlatBatch`).
    """

    single: ClassVar[bool]
    each: ClassVar[int] = 1
    drifts: ClassVar[bool] = False
    replaceable: ClassVar[bool] = True
    fixed: ClassVar[bool] = False

    @abstractmethod
    def length(self, example: Item) -> int:
        """How many tokens of an example reach the adapted layers: what it costs beside others of this length."""

    def sizes(self, example: Item) -> Sequence[int]:
        """The tokens of each of its rows, which are the lengths of their dropout masks."""
        return (self.length(example),)

    def by_row(self, of_examples: Tensor) -> Tensor:
        """Something of each example, for each row of its batch."""
        return of_examples.repeat_interleave(self.each, dim=0) if self.each > 1 else of_examples

    @abstractmethod
    def num_targets(self, examples: Sequence[Item]) -> int:
        """How many losses these examples have."""

    @abstractmethod
    def collate(self, examples: Sequence[Item]) -> Side:
        """The examples side by side."""

    @abstractmethod
    def logits(self, model: nn.Module, batch: Side, *, all_rows: bool = False) -> Tensor:
        """What the model predicts instead of each target, (targets, C), in float32 at least. `batch`: on the model's
        device. `all_rows`: an adapter or head of its own belongs to each row of the last layer's inputs."""

    def losses(self, model: nn.Module, batch: Side, *, all_rows: bool = False, wanted: Tensor | None = None) -> Tensor:
        """The losses (n,) in the logits' dtype: as `losses_of`, or divergences from `wanted` logits (targets, C)."""
        logits = self.logits(model, batch, all_rows=all_rows)
        return self.losses_of(logits, batch) if wanted is None else self.divergences(logits, batch, wanted)

    def losses_of(self, logits: Tensor, batch: Side) -> Tensor:
        """(n,): of each target its negative log-likelihood."""
        return nn.functional.cross_entropy(logits, batch.labels.to(logits.device), reduction="none")

    def divergences(self, logits: Tensor, batch: Side, wanted: Tensor) -> Tensor:
        """(n,): of predictions from `wanted` logits (targets, C)."""
        return divergence(logits, wanted)

    def drawn(self, logits: Tensor, batch: Side, generators: Sequence[torch.Generator]) -> Side:
        """The batch with labels drawn from softmax(logits), by inversion: so those of an example do not depend on its
        neighbours. `generators`: one for each example of the batch."""
        counts = torch.bincount(batch.rows.cpu(), minlength=len(generators)).tolist()
        uniform = [
            torch.rand(count, generator=own, dtype=torch.float64) for count, own in zip(counts, generators, strict=True)
        ]
        reached = logits.double().softmax(1).cumsum(1)
        labels = torch.searchsorted(reached, torch.cat(uniform).to(logits.device)[:, None] * reached[:, -1:])
        return replace(batch, labels=labels[:, 0].clamp_max(logits.shape[1] - 1))

    def answer(self, model: nn.Module, batch: Side) -> Answer:
        """Of a classifier: the logits and what its head reads. UserError: the examples are not classified."""
        raise self._not_classified()

    def under_head(self, head: State) -> Examples:
        """These examples under a linear head (weight, bias) instead of the model's. UserError: they have no classes."""
        raise self._not_classified()

    def _not_classified(self) -> UserError:
        return UserError(
            f"the method asks for what a classifier answers, but {type(self).__name__.lower()} has no classes; choose "
            "another base or method"
        )


class Text(Examples[TokenSequence, TextBatch]):
    """Token sequences (`packing.TokenSequence`) of a causal language model; each target token is one target."""

    single: ClassVar[bool] = False
    fixed: ClassVar[bool] = True

    num_targets = staticmethod(num_targets)
    collate = staticmethod(collate)

    def length(self, example: TokenSequence) -> int:
        return len(example.input_ids)

    def logits(self, model: nn.Module, batch: TextBatch, *, all_rows: bool = False) -> Tensor:
        """(targets, vocabulary) in float32, as transformers computes its loss."""
        return self.predictions(model, batch, all_rows=all_rows).float()

    def losses(
        self, model: nn.Module, batch: TextBatch, *, all_rows: bool = False, wanted: Tensor | None = None
    ) -> Tensor:
        if wanted is None and cast(PreTrainedModel, model).dtype != torch.float64:
            return self.token_losses(model, batch, all_rows=all_rows)
        # With weights in float64 `logits` is narrower than they are, so that its roundings are seen.
        return super().losses(model, batch, all_rows=all_rows, wanted=wanted)

    def token_losses(self, model: nn.Module, batch: TextBatch, *, all_rows: bool = False) -> Tensor:
        """(n,): the negative log-likelihoods in float32 at least, where possible without all logits at once."""
        if not all_rows and (last := last_layer(cast(PreTrainedModel, model))):
            with forwards({last.layer: last}):
                logits = self.predictions(model, batch)
            if logits.untyped_storage()._cdata == last.stand_in.untyped_storage()._cdata:  # nothing was made of them
                weight = last.layer.weight
                inputs = last.inputs.flatten(0, 1).to(weight.dtype)
                return head_losses(inputs, weight, last.layer.bias, batch.labels)
            _CHANGES_LOGITS.add(model)
        return self.losses_of(full(self.predictions(model, batch, all_rows=all_rows)), batch)

    def predictions(self, module: nn.Module, batch: TextBatch, *, all_rows: bool = False) -> Tensor:
        """(targets, vocabulary) in the dtype of the model; of a flat batch under `end_to_end.attend`.

        Only the hidden states that predict a target token go through the language-model head, which saves most of
        its work where responses are short; with `all_rows` (an adapted head needs all N rows) all of them do.
        No attention mask is given: with causal attention, padding on the right reaches no real token.
        """
        model = cast(PreTrainedModel, module)
        indices = batch.indices.to(model.device)  # of a batch that is there already this is nothing

        def keep_predicting(head: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            return inputs[0].flatten(0, 1).index_select(0, indices.to(inputs[0].device)).unsqueeze(0)

        with ExitStack() as stack:
            if not all_rows:
                handle = model.get_output_embeddings().register_forward_pre_hook(keep_predicting)
                stack.callback(handle.remove)
            stack.enter_context(known_masks())
            given = inputs_of(model, batch.input_ids, batch.lengths) if isinstance(batch, MicroBatch) else batch.inputs
            logits = model(**given, use_cache=False).logits.flatten(0, 1)
        if all_rows:
            logits = logits.index_select(0, indices)
        return logits


TEXT = Text()


def inputs_of(model: PreTrainedModel, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """What a model is given of rows (N, T) that are padded on the right, on its device: with positions where its
    rotary embeddings look at the length of a row."""
    inputs = {"input_ids": input_ids}
    rotary, width = regimes(model), input_ids.shape[1]
    if rotary is not None and width > rotary.border:
        inputs["position_ids"] = row_positions(lengths, width)
    return {name: value.to(model.device) for name, value in inputs.items()}
