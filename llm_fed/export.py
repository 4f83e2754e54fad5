"""What a run hands out: personal adapters as PEFT folders, personal image models as safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from llm_fed import adapters
from llm_fed.errors import UserError
from llm_fed.files import write_folder
from llm_fed.models.images import ImageBase
from llm_fed.models.loading import Base
from llm_fed.state import State
from llm_fed.structure import Full, Structure

WEIGHTS, CONFIG, PROCESSING = "model.safetensors", "config.json", "preprocessor_config.json"


def kind(structure: Structure, base: Base | ImageBase) -> str:
    """What a personal model is, for its card: a name in `card.KINDS`."""
    if isinstance(structure, Full):
        return "image model" if isinstance(base, ImageBase) and base.pretrained else "built image model"
    if isinstance(base, ImageBase):
        return "image adapter"
    return "adapter" if structure.plain else "experts"


def write(folder: Path, state: State, structure: Structure, base: Base | ImageBase, card: str) -> None:
    """Write one personal model: an adapter as `adapters.write` does, a whole model as safetensors.

    A checkpoint's model becomes a folder that `AutoModelForImageClassification.from_pretrained` loads.

    Raises:
        UserError: the folder holds other files.
        RunError: the disk is full, or the folder cannot be written.
    """
    if not isinstance(structure, Full):
        adapters.write(folder, state, structure, base, card)
        return
    assert isinstance(base, ImageBase)  # only image models train whole
    counters = {name: value for name, value in base.model.state_dict().items() if not value.is_floating_point()}
    whole = {**counters, **state.tensors(), **state.extras}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in whole.items()}
    labels = dict(enumerate(base.labels))
    settings = {"architecture": base.name, "id2label": labels}
    if base.pretrained:
        config: Any = base.model.config
        settings = {**config.to_dict(), "id2label": labels, "label2id": {v: k for k, v in labels.items()}}
    processing = {
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_resize": True,
        "size": {"height": base.size, "width": base.size}, "image_mean": base.mean, "image_std": base.std,
    }  # fmt: skip
    files = {
        WEIGHTS: save(tensors, metadata={"format": "pt"}),
        CONFIG: json.dumps(settings, indent=2, sort_keys=True, default=str).encode(),
        PROCESSING: json.dumps(processing, indent=2).encode(),
        adapters.CARD: card.encode(),
    }
    write_folder(folder, files, "a model")


def read(folder: Path, structure: Structure, base: Base | ImageBase) -> State:
    """The state in a folder that `write` made.

    Raises:
        UserError: no such folder, damaged files, or a model of another base.
    """
    if not isinstance(structure, Full):
        return adapters.read(folder, base, structure)[0]
    assert isinstance(base, ImageBase)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} is absent or damaged ({error}); export the model again") from error
    layout = base.layout(structure)
    for name, shape in layout.shape_of.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise UserError(f"the model {folder} does not fit the base {base.name!r}: {name} should be {shape}")
    entries = {name: tensors.pop(name) for name in layout.names}
    state = State.of(entries, {name: value for name, value in tensors.items() if value.is_floating_point()})
    if not state.is_finite():
        raise UserError(f"the model {folder} holds NaN or infinite numbers; export it again")
    return state
