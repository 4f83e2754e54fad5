"""Lora: the structure of what clients train - one adapter, or several experts and a gate - and its named entries.

Shape letters: E experts, r rank.
"""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import regex
import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError, one_line
from llm_fed.models.families import READ_LAYERS
from llm_fed.models.fused_experts import fused_parameters
from llm_fed.models.structure import Structure
from llm_fed.settings import check_fields
from llm_fed.settings.config import MODULES, AdapterConfig
from llm_fed.state import FACTORS, Layout, State, factor_of, magnitude, pair, router

ALL = "all-linear"  # as PEFT has it: all linear layers but the head
_LONGEST = 2.0  # seconds for a regular expression; an honest one takes milliseconds on thousands of names
_MOVED = (  # what becomes of adapters on layers of a mixture
    "where PEFT takes the names of layers for others; name the attention layers, e.g. "
    "adapter.target_modules=[q_proj,k_proj,v_proj,o_proj], and for all experts adapter.target_parameters="
    "[experts.gate_up_proj,experts.down_proj]"
)
ANCHORS, SCALE = "mix.anchors", "mix.scale"  # extras of a state whose gate is `mix`: (S, H) and ()


@dataclass(frozen=True)
class Lora(Structure):
    """The structure of what clients train (Hu et al. 2022); equal ones are trained together.

    With several experts each adapted layer adds `s * sum_e g_e B_e A_e x`. The gate says what g is: 1 (`sum`), a
    softmax of `router @ x` for every token and layer (`router`), or weights given per row of a batch (`mix`).
    """

    fused: ClassVar[bool] = True

    rank: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...] | str  # as in PEFT: last parts of names, a regular expression, or all-linear
    experts: tuple[str, ...] = ("",)  # adapters side by side on each layer; one alone needs no name
    gate: str = "sum"  # sum | router | mix
    whole: tuple[str, ...] = ()  # modules trained whole beside the adapters: an image model's head
    dora: bool = False  # whether each output has a magnitude beside the factors (DoRA, Liu et al. 2024)
    parameters: tuple[str, ...] = ()  # fused experts that are adapted beside the modules, as in PEFT: ends of names
    delta: bool = False  # whether something frozen lies beneath the adapters, in a state's extras (`merge.delta`)

    @classmethod
    def from_config(cls, config: AdapterConfig, whole: tuple[str, ...] = ()) -> Lora:
        """Raises UserError where a value cannot be an adapter's."""
        check_fields(config, "adapter.")
        if not isinstance(config.rank, int):
            raise UserError(f"adapter.rank is {config.rank!r}, ranks of several clients, where one number is needed")
        chosen = config.target_modules if isinstance(config.target_modules, str) else tuple(config.target_modules)
        alpha = config.alpha * (math.sqrt(config.rank) if config.rslora else 1)
        fused = tuple(sorted(set(config.target_parameters)))  # a set, as in PEFT
        if not chosen and not fused:
            raise UserError(f"adapter.target_modules is {chosen!r}; it must be {MODULES}")
        if fused and (config.dropout or config.dora):
            raise UserError(
                "adapter.target_parameters adapts the experts of a mixture, for which PEFT has neither dropout nor "
                "DoRA; set adapter.dropout=0 and adapter.dora=false"
            )
        return cls(config.rank, alpha, config.dropout, chosen, whole=whole, dora=config.dora, parameters=fused)

    def as_config(self) -> AdapterConfig:
        """The settings of such adapters, by which `from_config` makes it again."""
        return AdapterConfig(
            self.rank, self.alpha, dora=self.dora, dropout=self.dropout, target_modules=self.target_modules,
            target_parameters=self.parameters,
        )  # fmt: skip

    @property
    def scaling(self) -> float:
        """s: what the adapter's output B A x is multiplied by."""
        return self.alpha / self.rank

    @property
    def plain(self) -> bool:
        """Whether this is one adapter that stock PEFT knows."""
        return self.experts == ("",)

    def with_experts(self, *names: str, gate: str) -> Lora:
        if self.dora:
            raise UserError(
                "this method adds up several adapters on a layer, and the magnitudes of DoRA belong to one; set "
                "adapter.dora=false, or choose another method"
            )
        self._refuse_fused("adds up several adapters on a layer")
        return replace(self, experts=names, gate=gate)

    def only(self, expert: str) -> Lora:
        return replace(self, experts=(expert,), gate="sum")

    def mixture(self, *names: str) -> Lora:
        return self.with_experts(*names, gate="router")

    def gated(self, own: str, shared: str) -> Lora:
        return self.with_experts(shared, own, gate="router")

    def over_frozen(self) -> Lora:
        self._refuse_fused("folds adapters into the base")
        return replace(self, delta=True)

    def _refuse_fused(self, what: str) -> None:
        if self.parameters:
            raise UserError(
                f"this method {what}, which the experts of a mixture do not have; leave out adapter.target_parameters, "
                "or choose another method"
            )

    def of_rank(self, rank: int) -> Lora:
        return self if rank == self.rank else replace(self, rank=rank, alpha=self.scaling * rank)

    def doubled(self) -> Lora:
        return replace(self, rank=2 * self.rank, alpha=2 * self.alpha)

    def describe(self, ranks: Sequence[int] = ()) -> str:
        chosen = self.target_modules
        layers = ", ".join(([chosen] if isinstance(chosen, str) else [*chosen]) + [*self.parameters])
        one = "DoRA" if self.dora else "LoRA"
        several = f"{len(self.experts)} {one} adapters" if len(self.experts) > 1 else f"a {one} adapter"
        head = f" and the head {', '.join(self.whole)}" if self.whole else ""
        low, high = min(ranks, default=self.rank), max(ranks, default=self.rank)
        rank = f"rank {low}" if low == high else f"ranks {low} to {high}"
        return f"{several} of {rank} on {layers}{head}"


def targets(model: nn.Module, structure: Lora) -> dict[str, nn.Module]:
    """The linear layers that a structure adapts, by name and in module order, chosen as PEFT does: `nn.Linear` and its
    subclasses (such as bitsandbytes' 4- and 8-bit layers), and the `Conv1D` of transformers. UserError: nothing
    matches, or something that matches is no linear layer."""
    chosen = structure.target_modules
    modules = {name: module for name, module in model.named_modules() if name}
    linear, names = _linear(modules), names_of(model, chosen)
    if str(chosen).lower() == ALL:
        names = [name for name in names if name not in structure.whole]
        if mixture := next((name for name in modules if name.endswith(".experts")), None):
            raise UserError(
                f"adapter.target_modules=all-linear would include {mixture}, a mixture of experts, {_MOVED}"
            )
    if not names and (chosen or not structure.parameters):
        raise UserError(
            f"adapter.target_modules={chosen!r} matches no layer of {type(model).__name__}; "
            + _closest_layers([chosen.rpartition(".")[2]] if isinstance(chosen, str) else chosen, list(linear))
        )
    for name in names:
        if flaw := _unfit(name, modules, linear, model, structure):
            raise UserError(f"adapter.target_modules={chosen!r} matches {name}, {flaw}")
    return {name: linear[name] for name in names}


def _unfit(
    name: str, modules: Mapping[str, nn.Module], linear: Mapping[str, nn.Module], model: nn.Module, structure: Lora
) -> str:
    """Why a module that is matched cannot be adapted; empty where it can."""
    if name not in linear:
        inner = _endings([layer for layer in linear if layer.startswith(f"{name}.")], 1)
        within = f", such as {', '.join(inner[:8])} within it" if inner else ""
        return f"a {type(modules[name]).__name__}; only linear layers can be adapted{within}"
    if any(name.startswith(each.removesuffix("experts")) for each in modules if each.endswith(".experts")):
        return f"which belongs to a mixture of experts, {_MOVED}"
    from transformers import PreTrainedModel  # as in `names_of`

    unfelt = READ_LAYERS.get(model.config.model_type, ()) if isinstance(model, PreTrainedModel) else ()
    if name.rpartition(".")[2] in unfelt:
        beside = [each for each in _endings([layer for layer in linear if "." in layer], 1) if each not in unfelt]
        return (
            f"whose weights {type(model).__name__} may read without calling the layer, so that an adapter on it would "
            f"not be felt; leave it out, e.g. adapter.target_modules=[{','.join(beside[:4])}]"
        )
    return "which is trained whole; leave it out" if name in structure.whole else ""


def names_of(model: nn.Module, chosen: tuple[str, ...] | str) -> list[str]:
    """The modules that target modules match as PEFT reads them, by name and in module order, whatever they are.
    UserError: it is no regular expression, or one that takes too long."""
    modules = {name: module for name, module in model.named_modules() if name}
    if str(chosen).lower() == ALL:
        from transformers import PreTrainedModel  # takes seconds to import, and a wrong setting is to be named at once

        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        return [name for name, module in _linear(modules).items() if module is not head]
    if isinstance(chosen, str):
        return matching(chosen, modules)
    endings = tuple("." + ending for ending in chosen)
    return [name for name in modules if name in chosen or name.endswith(endings)]


def _linear(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those that can be adapted."""
    from transformers.pytorch_utils import Conv1D  # as in `names_of`

    return {name: module for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}


def matching(pattern: str, names: Iterable[str], key: str = "adapter.target_modules") -> list[str]:
    """The names that the whole of a regular expression matches, as `re.fullmatch` does. `key`: where it stands.
    UserError: it is none, or it has not ended after _LONGEST seconds: whoever wrote the folder that holds it chose
    it."""
    names, until = list(names), time.monotonic() + _LONGEST
    try:
        compiled = re.compile(pattern)
        try:
            bounded = regex.compile(pattern)
        except regex.error:  # a few expressions mean nothing to it and something to `re`
            return [name for name in names if compiled.fullmatch(name)]
        return [name for name in names if bounded.fullmatch(name, timeout=max(until - time.monotonic(), 1e-3))]
    except TimeoutError as error:
        raise UserError(
            f"{key}={one_line(pattern)!r} took longer than {_LONGEST:g} s to match the names "
            "of the model's layers; give a simpler regular expression, or a list of names"
        ) from error
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"{key}={one_line(pattern)!r} is not a valid regular expression: {one_line(str(error))}"
        ) from error


def check_names(model: nn.Module, adapter: AdapterConfig | None) -> None:
    """Refuse a configuration whose list of target modules has names that match nothing: whoever made the mistake would
    train fewer layers than they think. `targets` takes what a list matches, as PEFT does, so that folders of strangers
    may name more than a base has. UserError: every such name, and the linear layers with the closest names."""
    if adapter is None or isinstance(adapter.target_modules, str):
        return
    modules = dict(model.named_modules())
    if absent := [
        name for name in adapter.target_modules if not any(f".{each}".endswith(f".{name}") for each in modules)
    ]:
        raise UserError(
            f"adapter.target_modules names {' and '.join(map(repr, absent))}, but no layer of {type(model).__name__} "
            f"has this name; {_closest_layers(absent, [*_linear(modules)])}"
        )


def _closest_layers(wanted: Sequence[str], linear: Collection[str]) -> str:
    """In words, the names of linear layers that are closest to each wanted one, with as many parts as it has."""
    close: dict[str, None] = {}
    known: dict[str, None] = {}
    for name in wanted:
        endings = _endings(linear, name.count(".") + 1)
        known |= dict.fromkeys(endings)
        close |= dict.fromkeys(difflib.get_close_matches(name, endings, n=3 if len(wanted) > 1 else 8, cutoff=0))
    return f"it has linear layers named {', '.join(close)}{', ...' if len(known) > len(close) else ''}"


def _endings(names: Collection[str], parts: int) -> list[str]:
    """The different last `parts` of dotted names."""
    return list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))


def extras_flaw(extras: Mapping[str, Tensor], gate: str, width: int) -> str:
    """What is wrong with the extras of a state of several experts, or nothing: a mix has anchors (S, width) and a scale
    (), other gates have no extras."""
    wanted = {ANCHORS, SCALE} if gate == "mix" else set()
    if extras.keys() != wanted:
        held = one_line(", ".join(sorted(extras))) or "nothing"
        return f"{held} lies beside its gate, where {' and '.join(sorted(wanted)) or 'nothing'} should be"
    shapes = {name: tuple(extras[name].shape) for name in wanted}
    if wanted and not (len(shapes[ANCHORS]) == 2 and shapes[ANCHORS][0] and shapes[ANCHORS][1] == width):
        return f"{ANCHORS} is {shapes[ANCHORS]}, and should be (one or more, {width})"
    return f"{SCALE} is {shapes[SCALE]}, and should be one number" if shapes.get(SCALE) else ""


def layout(model: nn.Module, structure: Lora) -> Layout:
    """The entries of one client's state, in module order.

    Per layer and expert `{module}.{expert}.lora_A` (r, in) and `.lora_B` (out, r), an unnamed expert without its
    part of the name; with DoRA `{module}.lora_magnitude_vector` (out,); then, with a router, `{module}.router` (E, in).
    Then those of fused experts, `{block}.{parameter}.{expert}.lora_A` and `.lora_B`; last the parameters of modules
    trained whole.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in targets(model, structure).items():
        inputs, outputs = sizes(module)
        for expert in structure.experts:
            shapes |= zip(pair(name, expert), ((structure.rank, inputs), (outputs, structure.rank)), strict=True)
        if structure.dora:
            shapes[magnitude(name)] = (outputs,)
        if structure.gate == "router":
            shapes[router(name)] = (len(structure.experts), inputs)
    for name, (inputs, outputs) in expert_sizes(model, structure).items() if structure.parameters else ():
        shapes |= zip(pair(name, ""), ((structure.rank, inputs), (outputs, structure.rank)), strict=True)
    if structure.whole:
        shapes |= {name: tuple(each.shape) for name, each in whole_parameters(model, structure).items()}
    return Layout(tuple(shapes), tuple(shapes.values()))


def expert_sizes(model: nn.Module, structure: Lora) -> dict[str, tuple[int, int]]:
    """(in, out) of each adapted expert of a mixture, by `{block}.{parameter}.{expert}`."""
    return {
        f"{name}.{expert}": fused.sizes
        for name, fused in fused_parameters(model, structure.parameters).items()
        for expert in range(fused.experts)
    }


def adapted(model: nn.Module, structure: Lora) -> list[str]:
    """The names of all that has an A and a B: linear layers, and experts of a mixture."""
    return [*targets(model, structure), *expert_sizes(model, structure)]


def whole_parameters(model: nn.Module, structure: Lora) -> dict[str, nn.Parameter]:
    """The model's own parameters that are trained beside the adapters."""
    return {
        f"{module}.{name}": parameter
        for module in structure.whole
        for name, parameter in model.get_submodule(module).named_parameters()
    }


def draw(model: nn.Module, structure: Lora, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> State:
    """A fresh adapter as PEFT draws it, from a CPU generator: A uniform within 1/sqrt(in) of zero, B zero. Experts draw
    one after another; routers start at zero, so that all experts weigh the same. Modules trained whole start as the
    model has them."""
    indices = layout(model, structure)
    state = State(indices, torch.zeros(indices.size, dtype=dtype))
    for name, parameter in whole_parameters(model, structure).items() if structure.whole else ():
        state[name].copy_(parameter.detach())
    for name, module in targets(model, structure).items() if structure.dora else ():
        state[magnitude(name)].copy_(torch.linalg.vector_norm(weight_of(module).to(dtype), dim=1))
    for name in indices.names:
        if factor_of(name) == FACTORS[0]:
            nn.init.kaiming_uniform_(state[name], a=math.sqrt(5), generator=generator)
    return state


def weight_of(module: nn.Module) -> Tensor:
    """(out, in): the weights of a linear layer. UserError: they are quantised."""
    from transformers.pytorch_utils import Conv1D

    weight = module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        raise UserError("adapter.dora needs the base's weights, but they are quantised; set base.quantization=null")
    return weight.detach().T if isinstance(module, Conv1D) else weight.detach()


def sizes(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):  # keeps its weight transposed
        inputs, outputs = module.weight.shape
        return inputs, outputs
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features
