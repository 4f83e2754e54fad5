"""Writes, reads and checks PEFT adapter folders; the only file that imports peft."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llm_fed.config import AdapterConfig
from llm_fed.errors import UserError, one_line
from llm_fed.export.tensors import check_settings, in_one_dtype, load, pack
from llm_fed.files import write_folder
from llm_fed.merge import delta
from llm_fed.models.lora import Lora, extras_flaw, layout, targets
from llm_fed.paths import public
from llm_fed.state import Layout, State

if TYPE_CHECKING:
    from llm_fed.models.images import ImageBase
    from llm_fed.models.loading import Base

CONFIG, WEIGHTS, CARD = "adapter_config.json", "adapter_model.safetensors", "README.md"
WHAT = "an adapter"  # what such a folder holds, for messages
# Of several experts: routers, mixing rule, and modules trained whole; its metadata names the experts in order.
GATE = "gate.safetensors"

# The settings of an adapter that are understood here, and those that do not change what it computes. Whatever
# else differs from PEFT's default is a feature that the bank does not have.
_UNDERSTOOD = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "fan_in_fan_out", "modules_to_save",
}  # fmt: skip
_INERT = {"peft_version", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path", "revision"}
# Initialisations that leave the base's weights alone; the others (PiSSA, OLoRA, LoftQ, ...) change them.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal")
_MOST_ALPHA = 1e6  # times the rank; none that is trained comes near it, and beyond it float32 overflows
_CONFIGS: WeakKeyDictionary[nn.Module, dict[tuple[Lora, str, str], bytes]] = WeakKeyDictionary()  # see `_config`


class AdapterWarning(UserWarning):
    """An adapter that fits the base names another one."""


def write(
    folder: Path, state: State, structure: Lora, base: Base | ImageBase, card: str, more: Mapping[str, bytes] = {}
) -> None:
    """Write one adapter as a folder that `peft.PeftModel.from_pretrained(model, folder)` loads; it appears complete or
    not at all, see `files.write_folders`.

    Args: as `contents`.

    Raises:
        UserError: the folder holds other files than an adapter's.
        RunError: the disk is full, or the folder cannot be written.
    """
    write_folder(Path(folder), contents(state, structure, base, card, more), WHAT)


def contents(
    state: State, structure: Lora, base: Base | ImageBase, card: str, more: Mapping[str, bytes] = {}
) -> dict[str, bytes]:
    """What an adapter's folder holds, by path in it.

    What lies beneath an adapter becomes part of it, which gives it a higher rank. Several experts become one such
    folder each, `folder/<expert>`, beside a gate.safetensors with what weighs them and with the head that they share;
    `llm_fed.load_client` loads the whole.

    Args:
        state: the entries of `bank.layout(base.model, structure)`; their dtype is kept.
        card: the text of README.md, see `llm_fed.export.card.model_card`.
        more: further files by name.
    """
    if structure.delta:
        state, structure = delta.joined(state, structure)
    return {**_files(state, structure, base), CARD: card.encode(), **more}


def read(folder: Path, base: Base | ImageBase, structure: Lora | None = None) -> tuple[State, Lora]:
    """Read a PEFT LoRA folder, whoever wrote it, or a folder of several experts as `write` makes it: its state (at
    least float32) and its structure.

    An rsLoRA adapter is returned as the plain LoRA that computes the same. An adapter that names another base
    is taken with a warning if all its entries fit.

    Args:
        structure: the rank, scaling and target modules that the adapter must have (dropout may differ).

    Raises:
        UserError: no adapter folder, damaged files, a feature that is not supported, or an adapter of another
            base, rank or scaling.
    """
    folder = Path(folder)
    if structure and structure.delta:
        state, found = read(folder, base)
        return delta.apart(state, found, layout(base.model, structure)), structure
    if (folder / GATE).is_file() or (structure and not structure.plain):
        return _read_experts(folder, base, structure)
    found, name = _read_config(folder)
    if found.whole not in ((), (base.head,)):
        raise UserError(f"the adapter {folder} is not plain LoRA: modules_to_save={list(found.whole)} is not supported")
    if structure and not (found.rank == structure.rank and math.isclose(found.scaling, structure.scaling)):
        raise UserError(
            f"the adapter {folder} has rank {found.rank} and alpha {found.alpha:g}, where adapter.rank="
            f"{structure.rank} and adapter.alpha={structure.alpha:g} are expected"
        )
    # A base has one name on the Hub and others on disks, and what is handed on names a folder by its last part.
    other = name and Path(name).name != Path(base.name).name
    other_base = f"; it was made for {name!r}, the base here is {base.name!r}" if other else ""
    try:
        expected = layout(base.model, structure or found)
    except UserError as error:
        raise UserError(f"the adapter {folder} does not fit the base: {error}{other_base}") from error
    tensors = _read_tensors(folder, found)
    if difference := _difference(expected, tensors):
        raise UserError(f"the adapter {folder} does not fit the base: {difference}{other_base}")
    if other_base:
        warnings.warn(f"the adapter {folder} fits{other_base}", AdapterWarning, stacklevel=2)
    state = State.of({entry: tensors[_peft_name(entry)] for entry in expected.names})
    if not state.is_finite():
        raise UserError(f"the adapter {folder} holds NaN or infinite numbers; export it again")
    return state, found


def folded(folder: Path, base: Base) -> nn.Module:
    """The base's model with an adapter folded into its weights, in their dtype; the base is used up.

    Raises:
        UserError: see `read`; or a weight becomes too large for the dtype.
    """
    import peft  # as in `_peft_settings`

    read(folder, base)  # names what is wrong with it
    try:
        return peft.PeftModel.from_pretrained(base.model, folder).merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise UserError(f"the adapter {folder} cannot be merged into {base.dtype} weights: {error}") from error


def setting(folder: Path, key: str) -> Any:
    """One value of a PEFT folder's configuration, None where it is not there.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / CONFIG} is damaged: {error}") from error


def public_config(path: Path) -> bytes:
    """An adapter_config.json for others: the folder of a base on this machine is cut to its last name.

    Raises:
        UserError: the file is damaged.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = public(settings.get("base_model_name_or_path"))
        return json.dumps(settings, indent=2, sort_keys=True).encode()
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {one_line(str(error))}; export the adapter again") from error


def check_text(folder: Path) -> None:
    """Refuse a PEFT folder with a head, where no task says that it is an image model's, and with which labels.

    Raises:
        UserError: it has one.
    """
    if (folder / CONFIG).is_file() and (head := setting(folder, "modules_to_save")):
        named = ", ".join(map(str, head)) if isinstance(head, list) else str(head)
        raise UserError(
            f"the adapter {folder} has a classification head ({one_line(named)}), so it is for an image model; give "
            "--task NAME for its labels, and --data PATH if the pictures are not on the Hub"
        )


def check_head(folder: Path, structure: Lora, base: Base | ImageBase) -> None:
    """Refuse an adapter without the head that adapters of this base have.

    Raises:
        UserError: an image model's adapter has none.
    """
    if base.head not in ("", *structure.whole):
        raise UserError(
            f"the adapter {folder} has no classification head ({base.head}), which an adapter of an image model needs"
        )


def _files(state: State, structure: Lora, base: Base | ImageBase) -> dict[str, bytes]:
    """What an adapter's folder holds beside its card, by path in the folder."""
    if not structure.plain:
        return _expert_files(state, structure, base)
    tensors = {_peft_name(name): tensor for name, tensor in state.tensors().items()}
    return {
        CONFIG: _config(structure, base),
        WEIGHTS: pack(tensors, {}, _decisive(structure)),
    }


def _config(structure: Lora, base: Base | ImageBase) -> bytes:
    """What adapter_config.json says; of all clients with one structure it is made once."""
    known = _CONFIGS.setdefault(base.model, {})
    if (structure, base.name, base.head) not in known:
        modules, alpha = targets(base.model, structure).values(), structure.alpha
        settings = _peft_settings(
            task_type=None if base.head else "CAUSAL_LM",
            base_model_name_or_path=base.name,
            r=structure.rank,
            lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
            lora_dropout=structure.dropout,
            target_modules=_chosen(base.model, structure),
            fan_in_fan_out=all(isinstance(module, Conv1D) for module in modules),
            modules_to_save=list(structure.whole) or None,
            inference_mode=True,
        )
        # Sets are sorted: their own order changes from process to process.
        text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
        known[structure, base.name, base.head] = text.encode()
    return known[structure, base.name, base.head]


def _expert_files(state: State, structure: Lora, base: Base | ImageBase) -> dict[str, bytes]:
    files, gate = {}, {name: state[name] for name in state if ".lora_" not in name}
    for expert in structure.experts:
        own = state.select(re.escape(f".{expert}.lora_")).renamed(f".{expert}.lora_", ".lora_")
        for name, data in _files(own, _alone(structure), base).items():
            files[f"{expert}/{name}"] = data
    metadata = {"gate": structure.gate, "experts": " ".join(structure.experts)}
    if structure.whole:
        metadata["whole"] = " ".join(structure.whole)
    return {**files, GATE: pack({**gate, **state.extras}, metadata)}


def _decisive(structure: Lora) -> dict[str, Any]:
    """What of an adapter's settings decides what it computes and is not seen in the shapes of its tensors."""
    return {"lora_alpha": float(structure.alpha), "modules_to_save": list(structure.whole)}


def _read_experts(folder: Path, base: Base | ImageBase, structure: Lora | None) -> tuple[State, Lora]:
    path = folder / GATE
    tensors, metadata = load(path, "export the adapter again")
    gate, experts = metadata.get("gate", ""), tuple(metadata.get("experts", "").split(" "))
    whole = tuple(metadata.get("whole", "").split())
    if gate not in ("sum", "router", "mix") or any(name in ("", ".", "..") or "/" in name for name in experts):
        raise UserError(
            f"{path} weighs the experts {one_line(repr(experts))} by {one_line(repr(gate))}: each must be the name of "
            "a folder beside it, and the gate sum, router or mix; export the adapter again"
        )
    if structure and (gate, experts) != (structure.gate, structure.experts):
        raise UserError(
            f"{path} weighs the experts {', '.join(experts)} by {gate}, where {', '.join(structure.experts)} "
            f"and {structure.gate} are expected"
        )
    head = structure.whole if structure else (base.head,) if base.head else ()
    if whole != head:
        raise UserError(
            f"{path} was trained with the head {', '.join(whole) or 'none'}, not {', '.join(head) or 'none'}"
        )
    alone = _alone(structure) if structure else None
    entries = {}
    for expert in experts:
        state, found = read(folder / expert, base, alone)
        if alone and found.rank != alone.rank:
            raise UserError(f"the experts of {folder} differ in rank: {found.rank} and {alone.rank}")
        alone = alone or found
        entries.update(state.renamed(".lora_", f".{expert}.lora_").tensors())
    assert alone is not None  # there is at least one expert
    together = replace(alone, whole=whole).with_experts(*experts, gate=gate)
    expected = layout(base.model, together)
    entries.update((name, tensors.pop(name)) for name in expected.names if name in tensors)
    for name, shape in expected.shape_of.items():
        if name not in entries or tuple(entries[name].shape) != shape:
            raise UserError(f"{path} does not fit the base: {name} should be {shape}")
    if flaw := extras_flaw(tensors, gate, _width(base)):
        raise UserError(f"{path} does not fit the base: {flaw}; export the adapter again")
    alike = in_one_dtype(entries | tensors, path)
    state = State.of({name: alike[name] for name in expected.names}, {name: alike[name] for name in tensors})
    if not state.is_finite():
        raise UserError(f"{path} holds NaN or infinite numbers; export the adapter again")
    return state, together


def _width(base: Base | ImageBase) -> int:
    """Of the features that a base computes of a prompt or a picture."""
    model: Any = base.model
    return model.get_submodule(base.head).in_features if base.head else model.config.get_text_config().hidden_size


def _alone(structure: Lora) -> Lora:
    """One of the experts as stock PEFT knows it; what is trained whole belongs to all of them."""
    return replace(structure, experts=("",), gate="sum", whole=())


def _chosen(model: nn.Module, structure: Lora) -> str | list[str]:
    """How PEFT is told the target modules; its `all-linear` would include a head that is trained whole."""
    chosen = structure.target_modules
    if not isinstance(chosen, str):
        return list(chosen)
    return "|".join(map(re.escape, targets(model, structure))) if structure.whole else chosen


def _peft_name(entry: str) -> str:
    return f"base_model.model.{entry}.weight" if entry.endswith((".lora_A", ".lora_B")) else f"base_model.model.{entry}"


def _peft_settings(**settings: Any) -> dict[str, Any]:
    """A LoRA configuration as PEFT writes it, with PEFT's defaults for what is not given."""
    import peft  # here, because the import takes seconds and most commands need no adapter folder

    return peft.LoraConfig(**settings).to_dict()


def _read_config(folder: Path) -> tuple[Lora, str]:
    """The structure in an adapter's configuration, and the name of the base that it was made for (or "")."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} is not an adapter folder: it has no {CONFIG}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind = values["peft_type"]
        unsupported = _unsupported(values)
        chosen, name = values["target_modules"], values.get("base_model_name_or_path") or ""
        whole = tuple(values.get("modules_to_save") or ())
        if not isinstance(name, str) or not all(isinstance(each, str) for each in whole):
            raise TypeError("base_model_name_or_path and each of modules_to_save are texts")
        structure = Lora.from_config(
            AdapterConfig(
                rank=values["r"],
                alpha=values["lora_alpha"] * (math.sqrt(values["r"]) if values.get("use_rslora") else 1),
                dropout=values["lora_dropout"],
                target_modules=chosen if isinstance(chosen, str) else tuple(chosen or ()),
            ),
            whole=whole,
        )
        if not math.isfinite(structure.alpha) or structure.alpha > _MOST_ALPHA * structure.rank:
            raise ValueError(f"lora_alpha={values['lora_alpha']} is over {_MOST_ALPHA:g} times the rank")
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        UserError,
    ) as error:
        raise UserError(f"{path} is not the configuration of a LoRA adapter: {one_line(repr(error))}") from error
    if kind != "LORA":
        raise UserError(f"the adapter {folder} is of type {kind}; only LORA is supported")
    if unsupported:
        raise UserError(f"the adapter {folder} is not plain LoRA: {unsupported} is not supported")
    return structure, name


def _unsupported(values: Mapping[str, Any]) -> str:
    """The first setting that the bank does not have, or nothing; an empty value means that it is off."""
    defaults = _peft_settings()
    for name, value in values.items():
        if name == "init_lora_weights":
            known = value in _INITIALISATIONS
        else:
            known = name in _UNDERSTOOD | _INERT or not value or value == defaults.get(name)
        if not known:
            return f"{name}={value!r}"
    return ""


def _read_tensors(folder: Path, found: Lora) -> dict[str, Tensor]:
    """All tensors of an adapter, in one dtype of at least float32."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; only safetensors is read (convert .bin files with PEFT)")
    tensors, metadata = load(path, "fetch or export the adapter again")
    check_settings(metadata, _decisive(found), folder / CONFIG)
    return in_one_dtype(tensors, path)


def _difference(expected: Layout, tensors: Mapping[str, Tensor]) -> str:
    """What of the file is not as expected, or nothing."""
    wanted = {_peft_name(name): shape for name, shape in expected.shape_of.items()}
    for name in [*wanted, *tensors]:
        ours, theirs = wanted.get(name), tuple(tensors[name].shape) if name in tensors else None
        if ours != theirs:
            return f"{name} is {theirs or 'absent'} in the file and {ours or 'absent'} in the base"
    return ""
