"""Writes, reads and checks PEFT adapter folders."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, one_line
from llm_fed.export import peft_settings
from llm_fed.export.origins import read_origin
from llm_fed.export.peft_settings import CONFIG, AdapterSettings, decisive, trained_whole
from llm_fed.export.tensors import check_settings, in_one_dtype, load, pack
from llm_fed.merge import delta
from llm_fed.merge.factors import rank_of
from llm_fed.models.base import Base
from llm_fed.models.fused_experts import fused_parameters
from llm_fed.models.lora import Lora, extras_flaw, layout, sizes
from llm_fed.state import FACTORS, Layout, State, pair

WEIGHTS, CARD = "adapter_model.safetensors", "README.md"
WHAT = "an adapter"  # what such a folder holds, for messages
# Of several experts: routers, mixing rule, and modules trained whole; its metadata names the experts in order.
GATE = "gate.safetensors"
PREFIX = "base_model.model."  # of PEFT's names


class AdapterWarning(UserWarning):
    """An adapter that fits the base names another one."""


def contents(state: State, structure: Lora, base: Base, card: str, more: Mapping[str, bytes] = {}) -> dict[str, bytes]:
    """What an adapter's folder holds, by path in it: PEFT loads it.

    What lies beneath an adapter becomes part of it, which gives it a higher rank. Several experts become one such
    folder each beside a gate.safetensors with what weighs them and the head that they share; `llm_fed.load_client`
    loads the whole.

    Args:
        state: the entries of `bank.layout(base.model, structure)`; their dtype is kept.
        card: the text of README.md.
        more: further files by name.
    """
    if structure.delta:
        state = delta.joined(state, structure.scaling)
        structure = replace(structure.of_rank(rank_of(state)), delta=False)
    return {**_files(state, structure, base), CARD: card.encode(), **more}


def read(folder: Path, base: Base, structure: Lora | None = None) -> tuple[State, Lora]:
    """Read a PEFT LoRA folder, whoever wrote it, or a folder of several experts as `contents` has it: its state (at
    least float32) and its structure, of rsLoRA that of the plain LoRA that computes the same. An adapter that names
    another base is taken with a warning if all its entries fit. `structure`: the rank, scaling and target modules that
    the adapter must have (dropout may differ). UserError: no adapter folder, damaged files, a feature that is not
    supported, or another base, rank or scaling."""
    folder = Path(folder)
    if structure and structure.delta:
        state, stored = read(folder, base)
        return delta.apart(state, stored.scaling, layout(base.model, structure)), structure
    if (folder / GATE).is_file() or (structure and not structure.plain):
        return _read_experts(folder, base, structure)
    said = peft_settings.read(folder)
    said = said.model_copy(update={"whole": _modules(base, said.whole)})
    if said.whole not in ((), base.heads):
        raise trained_whole(folder, said.whole, base.heads)
    stored, other_base = said.structure(base.model), _other_base(folder, base)
    if structure and structure.dora != stored.dora:
        kinds = ("LoRA", "DoRA")
        raise UserError(
            f"the adapter {folder} is a {kinds[stored.dora]} adapter, where {kinds[structure.dora]} is expected; set "
            f"adapter.dora={str(stored.dora).lower()}"
        )
    if structure and not (stored.rank == structure.rank and math.isclose(stored.scaling, structure.scaling)):
        raise _other_scaling(said, stored, structure)
    try:
        expected = layout(base.model, structure or stored)
    except UserError as error:
        raise UserError(f"the adapter {folder} does not fit the base: {error}{other_base}") from error
    given = read_tensors(folder, decisive(stored.alpha, stored.whole, stored.dora))
    tensors = _experts_apart(given, base.model, stored)
    if difference := _difference(expected, tensors, base.model):
        raise UserError(f"the adapter {folder} does not fit the base: {difference}{other_base}")
    if other_base:
        warnings.warn(f"the adapter {folder} fits{other_base}", AdapterWarning, stacklevel=2)
    state = State.of({entry: tensors[peft_name(entry)] for entry in expected.names})
    if not state.is_finite():
        raise UserError(f"the adapter {folder} holds NaN or infinite numbers; export it again")
    return state, stored


def check_one(folder: Path, why: str) -> None:
    """Refuse a folder of several experts. UserError: `why` they do not serve here."""
    if (folder / GATE).is_file():
        raise UserError(f"{folder} holds several adapters that a gate weighs for each prompt or token, {why}")


def check_head(folder: Path, structure: Lora, base: Base) -> None:
    """Refuse an adapter without the head that a classifier's have. UserError: it has none."""
    if base.heads and base.heads != structure.whole:
        kind = "a sequence classifier" if base.tokenizer else "an image model"
        raise UserError(
            f"the adapter {folder} has no classification head ({', '.join(base.heads)}), which an adapter of {kind} "
            "needs"
        )


def _modules(base: Base, names: tuple[str, ...]) -> tuple[str, ...]:
    """The layers that PEFT's `modules_to_save` names, as `base.heads` has them: PEFT takes the ends of names, also of
    modules that hold several layers. Other names stay as they are."""
    modules = dict(base.model.named_modules())
    held = tuple(f"{location}." for location in modules if location and names and location.endswith(names))
    linear = [location for location, module in modules.items() if isinstance(module, nn.Linear)]
    layers = {location for location in linear if f"{location}.".startswith(held)}
    return base.heads if layers and layers == {*base.heads} else names


def _files(state: State, structure: Lora, base: Base) -> dict[str, bytes]:
    """What an adapter's folder holds beside its card, by path in the folder."""
    if not structure.plain:
        return _expert_files(state, structure, base)
    entries = _experts_together(state.tensors(), base.model, structure)
    tensors = {peft_name(name): tensor for name, tensor in entries.items()}
    weights = pack(tensors, {}, decisive(structure.alpha, structure.whole, structure.dora))
    return {CONFIG: peft_settings.written(structure, base), WEIGHTS: weights}


def _expert_files(state: State, structure: Lora, base: Base) -> dict[str, bytes]:
    files, gate = {}, {name: state[name] for name in state if ".lora_" not in name}
    for expert in structure.experts:
        own = state.select(re.escape(f".{expert}.lora_")).renamed(f".{expert}.lora_", ".lora_")
        for name, data in _files(own, _alone(structure), base).items():
            files[f"{expert}/{name}"] = data
    metadata = {"gate": structure.gate, "experts": " ".join(structure.experts)}
    if structure.whole:
        metadata["whole"] = " ".join(structure.whole)
    return {**files, GATE: pack({**gate, **state.extras}, metadata)}


def _read_experts(folder: Path, base: Base, structure: Lora | None) -> tuple[State, Lora]:
    path = folder / GATE
    tensors, metadata = load(path, "export the adapter again")
    gate, experts = metadata.get("gate", ""), tuple(metadata.get("experts", "").split(" "))
    whole = tuple(metadata.get("whole", "").split())
    if gate not in ("sum", "router", "mix") or any(name in ("", ".", "..") or "/" in name for name in experts):
        raise UserError(
            f"{path} weighs the experts {one_line(repr(experts))} by {one_line(repr(gate))}: each must be the name of "
            "a folder beside it, and the gate sum, router or mix; export the adapter again"
        )
    expected = (structure.gate, structure.experts, structure.whole) if structure else (gate, experts, base.heads)
    if (gate, experts, whole) != expected:
        given, wanted = (
            f"{', '.join(names) or 'none'} by {rule} and the head {', '.join(head) or 'none'}"
            for rule, names, head in ((gate, experts, whole), expected)
        )
        raise UserError(f"{path} weighs the experts {given}, where {wanted} are expected")
    alone = _alone(structure) if structure else None
    entries = {}
    for expert in experts:
        state, stored = read(folder / expert, base, alone)
        if alone and stored.rank != alone.rank:
            raise UserError(f"the experts of {folder} differ in rank: {stored.rank} and {alone.rank}")
        alone = alone or stored
        entries.update(state.renamed(".lora_", f".{expert}.lora_").tensors())
    assert alone is not None  # there is at least one expert
    together = replace(alone, whole=whole).with_experts(*experts, gate=gate)
    entries_of = layout(base.model, together)
    entries.update((name, tensors.pop(name)) for name in entries_of.names if name in tensors)
    for name, shape in entries_of.shape_of.items():
        if name not in entries or tuple(entries[name].shape) != shape:
            raise UserError(f"{path} does not fit the base: {name} should be {shape}")
    text = base.model.config.get_text_config() if not base.head else None
    width = text.hidden_size if text else sizes(base.model.get_submodule(base.head))[0]  # of what a gate reads
    if flaw := extras_flaw(tensors, gate, width):
        raise UserError(f"{path} does not fit the base: {flaw}; export the adapter again")
    alike = in_one_dtype(entries | tensors, path)
    extras = {name: alike[name] for name in tensors}
    state = State.of({name: alike[name] for name in entries_of.names}, extras)
    if not state.is_finite():
        raise UserError(f"{path} holds NaN or infinite numbers; export the adapter again")
    return state, together


def _alone(structure: Lora) -> Lora:
    """One of the experts as stock PEFT knows it; what is trained whole belongs to all of them."""
    return replace(structure, experts=("",), gate="sum", whole=())


def peft_name(entry: str) -> str:
    return f"{PREFIX}{entry}.weight" if entry.endswith((".lora_A", ".lora_B")) else f"{PREFIX}{entry}"


def _other_base(folder: Path, base: Base) -> str:
    """In words that an adapter was made for another base, or nothing."""
    origin, here = read_origin(folder), base.source
    if origin is None or origin.same_weights(here):
        return ""
    weights = ", which has other weights" if Path(origin.name).name == Path(here.name).name else ""
    return f"; it was made for {origin.name!r}, the base here is {here.name!r}{weights}"


def _other_scaling(said: AdapterSettings, stored: Lora, structure: Lora) -> UserError:
    """The error of an adapter with another rank or scaling than is expected, and which settings are its own."""
    alpha, by = stored.alpha, "rank (adapter.rslora=false)"
    if said.rslora:
        alpha, by = alpha / math.sqrt(stored.rank), "sqrt(rank) (adapter.rslora=true)"
    return UserError(
        f"the adapter {said.folder} has rank {stored.rank} and alpha {alpha:g}, scaled by alpha / {by}, where "
        f"adapter.rank={structure.rank} and adapter.alpha={structure.alpha:g} are expected"
    )


def read_tensors(folder: Path, decisive: Mapping[str, Json]) -> dict[str, Tensor]:
    """All tensors of an adapter, in one dtype of at least float32."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; only safetensors is read (convert .bin files with PEFT)")
    tensors, metadata = load(path, "fetch or export the adapter again")
    check_settings(metadata, decisive, folder / CONFIG)
    return in_one_dtype(tensors, path)


def _difference(expected: Layout, tensors: Mapping[str, Tensor], model: nn.Module) -> str:
    """What of the file is unexpected, or nothing. PEFT puts the base's own weights beside an adapter of its head."""
    wanted = {peft_name(name): shape for name, shape in expected.shape_of.items()}
    for name in [*wanted, *tensors]:
        ours, theirs = wanted.get(name), tuple(tensors[name].shape) if name in tensors else None
        if ours == theirs:
            continue
        entry = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        own = None if ours else dict(model.named_parameters(remove_duplicate=False)).get(entry)
        if own is None:
            return f"{name} is {theirs or 'absent'} in the file and {ours or 'absent'} in the base"
        if not _same(tensors[name], own.detach().cpu()):
            return f"the file has weights for {entry} that are not those of the base; it was trained or resized"
    return ""


def _same(theirs: Tensor, own: Tensor) -> bool:
    """Whether two tensors are equal where one of them was rounded to a shorter dtype."""
    shorter = [dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(theirs.to(dtype).to(theirs), theirs)]
    return any(torch.equal(theirs.to(dtype), own.to(dtype)) for dtype in (own.dtype, *shorter))


def _experts_together(entries: Mapping[str, Tensor], model: nn.Module, structure: Lora) -> dict[str, Tensor]:
    """An adapter's entries, those of each fused parameter as PEFT's one pair, A (E r, in) and B (out, r E): the
    experts' rows of A below each other, and their columns of B in turns. `entries`: of `models.lora.layout`."""
    made = dict(entries)
    for name, experts, location in _placed(model, structure):
        pairs = [pair(f"{name}.{expert}", "") for expert in range(experts)]
        a, b = ([made.pop(each[factor]) for each in pairs] for factor in (0, 1))
        made[f"{location}.{FACTORS[0]}"] = torch.cat(a)
        made[f"{location}.{FACTORS[1]}"] = torch.stack(b, -1).flatten(1)
    return made


def _experts_apart(tensors: Mapping[str, Tensor], model: nn.Module, structure: Lora) -> dict[str, Tensor]:
    """The tensors of a file by the names that an ordinary layer's would have, those of fused parameters by expert; what
    has not the shape of such a pair stays as it is."""
    made = dict(tensors)
    for name, experts, location in _placed(model, structure):
        a, b = (made.get(f"{PREFIX}{location}.{factor}.weight") for factor in FACTORS)
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or len(a) % experts or b.shape[1] % experts:
            continue
        parts = zip(a.chunk(experts), b.unflatten(1, (-1, experts)).unbind(-1), strict=True)
        for factor in FACTORS:
            del made[f"{PREFIX}{location}.{factor}.weight"]
        for expert, both in enumerate(parts):
            for entry, part in zip(pair(f"{name}.{expert}", ""), both, strict=True):
                made[f"{PREFIX}{entry}.weight"] = part.contiguous()
    return made


def _placed(model: nn.Module, structure: Lora) -> list[tuple[str, int, str]]:
    """Of each fused parameter that is adapted: its name, its number of experts, and where PEFT puts its adapter. It
    wraps a block once for each parameter, in their order, so all but the last have `base_layer` in their names."""
    of = defaultdict(list)
    for name, fused in fused_parameters(model, structure.parameters).items():
        of[name.rpartition(".")[0]].append((name, fused.experts))
    return [
        (name, experts, block + ".base_layer" * (len(held) - 1 - number))
        for block, held in of.items()
        for number, (name, experts) in enumerate(held)
    ]
