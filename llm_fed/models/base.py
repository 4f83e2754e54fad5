"""Base: the model that all clients share, as engine, exports and messages see it. What depends on its kind is asked of
`kinds.Kind`, which derives from it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llm_fed.models import lora, ranks
from llm_fed.models.origin import Origin
from llm_fed.models.structure import Full, Structure
from llm_fed.settings.config import AdapterConfig
from llm_fed.state import Layout, State

if TYPE_CHECKING:
    from llm_fed.models.prompt import Prompt


@dataclass(kw_only=True)
class Base:
    """A model in evaluation mode, and how it computes.

    Attributes:
        name: as configured, which is what exported adapters name as their base.
        dtype: of the weights; of the products, where the weights are quantised.
        autocast: the dtype of forward passes under autocast; None: they are computed in that of the weights.
        head: a classifier's last layer, which is trained whole beside adapters; empty: none.
        before_head: the layers between an encoder and its head, which are trained whole like it.
        labels: of a classifier, by index of the logits.
        tokenizer: of a model that reads texts; it has a pad token.
        prompt: what an adapter's folder says of its prompts, instead of `task.template` and of the base's own stop
            tokens.
        origin: None where the model was made in memory.
    """

    model: Any
    name: str
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    head: str = ""
    before_head: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    tokenizer: Any = None
    prompt: Prompt | None = None
    origin: Origin | None = None

    @property
    def heads(self) -> tuple[str, ...]:
        """What is trained whole beside adapters, the head last."""
        return (*self.before_head, self.head) if self.head else ()

    @property
    def device(self) -> torch.device:
        """Where its inputs are wanted."""
        return next(self.model.parameters()).device

    @property
    def source(self) -> Origin:
        """Where it is from; of a base that was made in memory only what it is called."""
        return self.origin or Origin(self.name, dtype=str(self.dtype).removeprefix("torch."))

    @property
    def rows(self) -> int:
        """Of the embedding: tokens from this number on have none."""
        return len(self.model.get_input_embeddings().weight)

    @property
    def num_parameters(self) -> int:
        """Of a quantised model as many as before."""
        counted = getattr(self.model, "num_parameters", None)
        return counted() if counted else sum(parameter.numel() for parameter in self.model.parameters())

    def computing(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def check_names(self, adapter: AdapterConfig | None) -> None:
        """Refuse names in `adapter.target_modules` that no layer has. UserError: the name, and the closest."""
        lora.check_names(self.model, adapter)

    def structure(self, adapter: AdapterConfig | None, architecture: str = "", rank: int | None = None) -> Structure:
        """What clients train by a configuration. UserError: a value cannot be an adapter's. `architecture`: of a whole
        model that is not the run's base. `rank`: of the client's adapter (default: the largest that a client has)."""
        if adapter is None:
            return Full((("", architecture),))
        if rank is None and not isinstance(adapter.rank, int):
            rank = ranks.largest(adapter.rank)
        return lora.Lora.from_config(adapter if rank is None else replace(adapter, rank=rank), whole=self.heads)

    def model_of(self, structure: Structure) -> nn.Module:
        """The model, or models side by side, that clients of this structure have. It is shared: do not change it."""
        return self.model

    def flat(self, structure: Structure) -> FlatModel:
        """A copy of `model_of(structure)` with all parameters in one row."""
        return FlatModel(copy.deepcopy(self.model_of(structure)))

    def head_in(self, structure: Structure) -> str:
        """The name of the last linear layer in `model_of(structure)`."""
        return self.head

    def layout(self, structure: Structure) -> Layout:
        """The entries of a client's state."""
        if isinstance(structure, lora.Lora):
            return lora.layout(self.model, structure)
        entries = dict(self.model_of(structure).named_parameters())
        return Layout(tuple(entries), tuple(tuple(p.shape) for p in entries.values()))

    def draw(self, structure: Structure, generator: torch.Generator) -> State:
        """A fresh state, from a CPU generator: adapters around the model as it is, and beside them a head that torch
        initialises, unless it is the checkpoint's."""
        if not self.head and isinstance(structure, lora.Lora):
            return lora.draw(self.model, structure, generator)
        seed = int(torch.randint(2**62, (), generator=generator))
        if not isinstance(structure, lora.Lora):
            return self._draw_whole(structure, seed)
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        state = lora.draw(self.model, structure, generator, dtype)
        for name in structure.whole:
            if self._given(name, structure):
                continue
            head = copy.deepcopy(self.model.get_submodule(name)).cpu()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                head.reset_parameters()
            for entry, parameter in head.named_parameters():
                state[f"{name}.{entry}"].copy_(parameter.detach())
        return state

    def _draw_whole(self, structure: Structure, seed: int) -> State:
        """A whole model: what is not a checkpoint's is drawn as torch initialises it."""
        fresh = copy.deepcopy(self.model_of(structure)).cpu()  # before the seed: making it draws, too
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, module in fresh.named_modules():
                if callable(reset := getattr(module, "reset_parameters", None)) and not self._given(name, structure):
                    reset()
        extras = {name: b.clone() for name, b in fresh.named_buffers() if b.is_floating_point()}
        return State.of(dict(fresh.named_parameters()), extras)

    def _given(self, module: str, structure: Structure) -> bool:
        """Whether a module's weights are a checkpoint's."""
        return False


class FlatModel:
    """A module around one row (P,) of parameters and one of gradients.

    The module's parameters become views of `row`, their gradients views of `grads`: loading a state, clipping,
    optimising and reading are then operations on rows. Floating buffers (BatchNorm statistics) are the extras of the
    states; integer ones (counters) stay in the module and never travel.

    Args:
        module: it is changed: from here on its parameters live in the row.
    """

    def __init__(self, module: nn.Module):
        self.module, self.parameters = module, dict(module.named_parameters())
        self.layout = Layout(tuple(self.parameters), tuple(tuple(p.shape) for p in self.parameters.values()))
        self.row = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters.values()])
        self.grads = torch.zeros_like(self.row)
        for name, parameter in self.parameters.items():
            span, shape = self.layout.slices[name], self.layout.shape_of[name]
            parameter.data = self.row[span].view(shape)
            parameter.requires_grad_(True)
            parameter.grad = self.grads[span].view(shape)
        self.buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}

    def load(self, state: State) -> None:
        """Put a state in. ValueError: it has other entries than the module."""
        if state.layout != self.layout or state.extras.keys() != self.buffers.keys():
            raise ValueError(f"the state's entries are not those of {type(self.module).__name__}")
        self.row.copy_(state.row)
        for name, buffer in self.buffers.items():
            buffer.copy_(state.extras[name])

    def read(self) -> State:
        """A copy of what is in, on the CPU."""
        return State(self.layout, self.row.cpu().clone(), {n: b.cpu().clone() for n, b in self.buffers.items()})


def freeze(model: nn.Module) -> None:
    """Make `model` a base: no gradients, eval mode, and 4-bit weights that stay fit for training."""
    model.requires_grad_(False).eval()
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes' first evaluation would turn the weights, for good, into a form
        # whose product has no backward: all gradients that pass through the layer would silently be lost.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
