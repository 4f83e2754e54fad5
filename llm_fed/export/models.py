"""What a run hands out: personal adapters as PEFT folders, personal image models as safetensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import UserError, one_line, require
from llm_fed.basics.files import write_folders
from llm_fed.basics.names import same_name
from llm_fed.export import peft_folders
from llm_fed.export.tensors import check_settings, in_one_dtype, load, pack, read_json
from llm_fed.kinds import Kind
from llm_fed.kinds.wording import Model
from llm_fed.models.lora import Lora
from llm_fed.models.prompt import Prompt
from llm_fed.models.structure import Structure
from llm_fed.state import State

WEIGHTS = "model.safetensors"


def seen(records: Iterable[Mapping[str, Any]], round: int) -> set[str]:
    """The clients of which an answer had arrived by the end of a round, by the lines of metrics.jsonl."""
    answers = [line for line in records if line["kind"] == "client"]
    return {line["client"] for line in answers if line["round"] + line.get("staleness", 0) <= round}


def chosen(requested: tuple[str, ...] | str, everybody: Collection[str], seen: Collection[str]) -> list[str]:
    """Those of `everybody` whose personal model is written, by `export.clients`."""
    words = {"all": everybody, "seen": seen, "none": ()}
    names = words[requested] if isinstance(requested, str) else [same_name(name, everybody) for name in requested]
    return [id for id in everybody if id in names]


def check_names(requested: Iterable[str], everybody: Collection[str]) -> None:
    """Refuse names in `export.clients` that nobody has. UserError: the name, and the closest."""
    for name in requested:
        require("export.clients", name, everybody)


def described(structure: Structure, base: Kind, labels: int, prompt: Prompt | None) -> Model:
    """What a personal model's card says of it; `labels`: how many a classifier tells apart."""
    names = tuple(dict.fromkeys(architecture or base.name for _, architecture in structure.parts))
    origin, own = base.source, names if names != (base.name,) else ()
    return Model(
        origin.name, base.wording(structure), labels, own, prompt, str(base.dtype).removeprefix("torch."),
        origin.revision, origin.quantization,
    )  # fmt: skip


def write(
    folder: Path, state: State, structure: Structure, base: Kind, card: str, prompt: Prompt | None = None
) -> None:
    """Write one personal model to a folder that appears complete or not at all; its arguments are those of `contents`.
    UserError: the folder holds other files. RunError: the disk is full, or the folder cannot be written."""
    what = peft_folders.WHAT if structure.fused else "a model"
    write_folders([(folder, contents(state, structure, base, card, prompt))], what)


def contents(
    state: State, structure: Structure, base: Kind, card: str, prompt: Prompt | None = None
) -> dict[str, bytes]:
    """What the folder of one personal model holds, by path in it: an adapter as `peft_folders.contents` has it, a whole
    model as safetensors, which transformers loads if it was a checkpoint's, and else `load.load_image_model`."""
    if isinstance(structure, Lora):
        return peft_folders.contents(state, structure, base, card, base.beside_adapters(prompt))
    counters = {name: v for name, v in base.model_of(structure).state_dict().items() if not v.is_floating_point()}
    settings = base.settings(structure)
    return {
        WEIGHTS: pack({**counters, **state.tensors(), **state.extras}, {}, settings),
        **{name: json.dumps(values, indent=2).encode() for name, values in settings.items()},
        peft_folders.CARD: card.encode(),
    }


def read(folder: Path, structure: Structure, base: Kind) -> State:
    """The state in a folder that `write` made. UserError: no such folder, damaged files, or a model of another base."""
    if isinstance(structure, Lora):
        return peft_folders.read(folder, base, structure)[0]
    tensors, metadata = load(folder / WEIGHTS, "export the model again")
    settings = {name: read_json(folder / name) for name in base.settings(structure)}
    check_settings(metadata, settings, folder / next(iter(settings)))
    module = base.model_of(structure)
    entries = dict(module.named_parameters())
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    known = entries | buffers
    held = {name: value for name, value in tensors.items() if value.is_floating_point() or name in known}
    floating = in_one_dtype(held, folder / WEIGHTS)  # but for counters
    needed = entries.keys() | (buffers.keys() & module.state_dict().keys())  # a stock file lacks what is computed anew
    for name in sorted(needed | floating.keys()):
        theirs, ours = (str(tuple(of[name].shape)) if name in of else "absent" for of in (floating, known))
        if theirs != ours:
            raise UserError(
                f"the model {folder} does not fit the base {base.name!r}: {one_line(name)} is {theirs}, "
                f"and should be {ours}"
            )
    statistics = {name: floating.get(name, buffer) for name, buffer in buffers.items()}
    state = State.of({name: floating[name] for name in entries}, statistics)
    if not state.is_finite():
        raise UserError(f"the model {folder} holds NaN or infinite numbers; export it again")
    return state
