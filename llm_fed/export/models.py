"""What a run hands out: personal adapters as PEFT folders, personal image models as safetensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import UserError, one_line, require
from llm_fed.basics.files import write_folder
from llm_fed.basics.names import same_name
from llm_fed.export import peft_folders
from llm_fed.export.card import Model
from llm_fed.export.tensors import check_settings, in_one_dtype, load, pack
from llm_fed.models.images import ImageBase
from llm_fed.models.loading import Base
from llm_fed.models.origin import origin_of
from llm_fed.models.prompt import FILE, Prompt
from llm_fed.models.structure import Full, Structure
from llm_fed.settings.paths import public
from llm_fed.state import State

WEIGHTS, CONFIG, PROCESSING = "model.safetensors", "config.json", "preprocessor_config.json"


def seen(records: Iterable[Mapping[str, Any]], round: int) -> set[str]:
    """The clients of which an answer had arrived by the end of a round.

    Args:
        records: lines of metrics.jsonl, which hold this also of a run that was interrupted.
    """
    answers = [line for line in records if line["kind"] == "client"]
    return {line["client"] for line in answers if line["round"] + line.get("staleness", 0) <= round}


def chosen(asked: tuple[str, ...] | str, everybody: Collection[str], seen: Collection[str]) -> list[str]:
    """Those of `everybody` whose personal model is written, by `export.clients`."""
    words = {"all": everybody, "seen": seen, "none": ()}
    names = words[asked] if isinstance(asked, str) else [same_name(name, everybody) for name in asked]
    return [id for id in everybody if id in names]


def check_names(asked: tuple[str, ...] | str, everybody: Collection[str]) -> None:
    """Refuse names in `export.clients` that nobody has.

    Raises:
        UserError: the name, and the closest.
    """
    for name in () if isinstance(asked, str) else asked:
        require("export.clients", name, everybody)


def kind(structure: Structure, base: Base | ImageBase) -> str:
    """What a personal model is, for its card: a name in `card.WORDINGS`."""
    if isinstance(structure, Full):
        assert isinstance(base, ImageBase)  # only image models train whole
        if not structure.plain:
            return "image models"
        ((_, architecture),) = structure.parts
        return "image model" if base.pretrained and architecture in ("", base.name) else "built image model"
    image = "image " if isinstance(base, ImageBase) else ""
    return image + ("adapter" if structure.plain else "experts")


def described(structure: Structure, base: Base | ImageBase, labels: int, prompt: Prompt | None) -> Model:
    """What a personal model's card says of it.

    Args:
        labels: how many an image model tells apart.
    """
    parts = structure.parts if isinstance(structure, Full) else (("", ""),)
    names = tuple(dict.fromkeys(architecture or base.name for _, architecture in parts))
    origin, own = origin_of(base), names if names != (base.name,) else ()
    return Model(
        origin.name, kind(structure, base), labels, own, prompt, str(base.dtype).removeprefix("torch."),
        origin.revision, origin.quantization,
    )  # fmt: skip


def write(
    folder: Path,
    state: State,
    structure: Structure,
    base: Base | ImageBase,
    card: str,
    prompt: Prompt | None = None,
) -> None:
    """Write one personal model to a folder that appears complete or not at all; its arguments are those of `contents`.

    Raises:
        UserError: the folder holds other files.
        RunError: the disk is full, or the folder cannot be written.
    """
    what = "a model" if isinstance(structure, Full) else peft_folders.WHAT
    write_folder(folder, contents(state, structure, base, card, prompt), what)


def contents(
    state: State, structure: Structure, base: Base | ImageBase, card: str, prompt: Prompt | None = None
) -> dict[str, bytes]:
    """What the folder of one personal model holds, by path in it: an adapter as `peft_folders.contents` has it, a whole
    model as safetensors.

    The `prompt` of a language model lies beside its adapter.

    A checkpoint's model becomes a folder that `AutoModelForImageClassification.from_pretrained` loads; one that is
    built here, and models side by side, one that `load.load_image_model` loads.
    """
    if not isinstance(structure, Full):
        more = {FILE: prompt.as_json(base.tokenizer, origin_of(base))} if prompt and isinstance(base, Base) else {}
        return peft_folders.contents(state, structure, base, card, more)
    assert isinstance(base, ImageBase)  # only image models train whole
    module = base.model_of(structure)
    counters = {name: value for name, value in module.state_dict().items() if not value.is_floating_point()}
    whole = {**counters, **state.tensors(), **state.extras}
    processing = {
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_resize": True,
        "size": {"height": base.size, "width": base.size}, "image_mean": base.mean, "image_std": base.std,
    }  # fmt: skip
    settings = json.loads(json.dumps(_settings(structure, base), sort_keys=True, default=str))
    return {
        WEIGHTS: pack(whole, {}, {CONFIG: settings, PROCESSING: processing}),
        CONFIG: json.dumps(settings, indent=2, sort_keys=True).encode(),
        PROCESSING: json.dumps(processing, indent=2).encode(),
        peft_folders.CARD: card.encode(),
    }


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON file of a folder that `write` made.

    Raises:
        UserError: it is absent or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is absent or damaged ({error}); give a folder of an exported image model") from error


def _settings(structure: Full, base: ImageBase) -> dict[str, Any]:
    """What config.json says: transformers' words for a checkpoint's model, else [name, architecture] of each part."""
    labels = dict(enumerate(base.labels))
    # It names the folder that it was loaded from.
    checkpoint: dict[str, Any] = public(base.model.config.to_dict()) if base.pretrained else {}  # type: ignore[operator, union-attr]
    if kind(structure, base) == "image model":
        return {**checkpoint, "id2label": labels, "label2id": {name: index for index, name in labels.items()}}
    # A checkpoint is none of our architectures, and its name may be a path of this machine: its configuration, then.
    unnamed = ("", base.name) if base.pretrained else ()
    parts = [[name, "" if own in unnamed else own or base.name] for name, own in structure.parts]
    settings: dict[str, Any] = {"parts": parts, "answer": structure.answer, "id2label": labels}
    if structure.answer == "gate":
        settings["gate"] = asdict(structure.gate)
    return settings | ({"checkpoint": checkpoint} if "" in dict(parts).values() else {})


def read(folder: Path, structure: Structure, base: Base | ImageBase) -> State:
    """The state in a folder that `write` made.

    Raises:
        UserError: no such folder, damaged files, or a model of another base.
    """
    if not isinstance(structure, Full):
        return peft_folders.read(folder, base, structure)[0]
    assert isinstance(base, ImageBase)
    tensors, metadata = load(folder / WEIGHTS, "export the model again")
    settings = {name: read_settings(folder / name) for name in (CONFIG, PROCESSING)}
    check_settings(metadata, settings, folder / CONFIG)
    module = base.model_of(structure)
    entries = dict(module.named_parameters())
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    known = entries | buffers
    counters = {name for name, value in tensors.items() if not (value.is_floating_point() or name in known)}
    found = in_one_dtype({name: value for name, value in tensors.items() if name not in counters}, folder / WEIGHTS)
    needed = entries.keys() | (buffers.keys() & module.state_dict().keys())  # a stock file lacks what is computed anew
    for name in sorted(needed | found.keys()):
        theirs, ours = (str(tuple(held[name].shape)) if name in held else "absent" for held in (found, known))
        if theirs != ours:
            raise UserError(
                f"the model {folder} does not fit the base {base.name!r}: {one_line(name)} is {theirs}, "
                f"and should be {ours}"
            )
    statistics = {name: found.get(name, buffer) for name, buffer in buffers.items()}
    state = State.of({name: found[name] for name in entries}, statistics)
    if not state.is_finite():
        raise UserError(f"the model {folder} holds NaN or infinite numbers; export it again")
    return state
