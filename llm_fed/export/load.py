"""Load a client's exported model: a LoRA folder of llm_fed or PEFT, also with several experts and a gate, or a whole
image model, alone or several side by side."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification

from llm_fed import kinds
from llm_fed.basics.errors import UserError, lookup, one_line
from llm_fed.export import models, peft_folders
from llm_fed.export.origins import as_trained, read_origin
from llm_fed.export.personal import Personal
from llm_fed.export.tensors import read_json
from llm_fed.kinds import Kind
from llm_fed.kinds.images import CONFIG, PROCESSING, Images, load_images
from llm_fed.kinds.modules import FILE as MODULE
from llm_fed.kinds.modules import Modules
from llm_fed.models.forms import check_settings
from llm_fed.models.images import ARCHITECTURES, head_of
from llm_fed.models.joined import respond
from llm_fed.models.labels import read_labels
from llm_fed.models.loading import attention
from llm_fed.models.prompt import prompt_for
from llm_fed.models.structure import Full, GateShape
from llm_fed.settings import check_fields
from llm_fed.settings.config import BaseConfig, Config, Dtype, TaskConfig
from llm_fed.state import State
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.labelled import KIND as SEQUENCES

# What torch, transformers and Python raise where a file says something else than a model's settings.
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, MemoryError)


def load_client(
    folder: str | Path,
    base: Kind | str,
    *,
    labels: int = 0,
    kind: str | None = None,
    dtype: Dtype | None = None,
    device: str = "cpu",
) -> Personal:
    """A client's personal model from `adapters/<client>` of a run, a copy of it, or any PEFT LoRA folder.

    Args:
        base: the base model, or its Hub id or folder, which is then loaded on `device`, quantised as in training.
        dtype: of a base that is loaded (default: that of training, or float32 where the folder does not say it).
        labels: the number of labels of an image model; 0: a language model, or a sequence classifier, whose folder
            names its labels.
        kind: another kind of base, as `base.kind` names it.

    UserError: the base cannot be loaded, or the folder is damaged or does not hold an adapter of this base.
    """
    if isinstance(base, str):
        config = BaseConfig(name=base, dtype=dtype or "float32", kind=kind)
        check_fields(config, "")
        notes: list[str] = []
        config = as_trained(config, read_origin(Path(folder)), ["base.dtype"] if dtype else [], notes.append)
        if notes and not config.quantization:  # it could not be what it was
            warnings.warn(notes[0], peft_folders.AdapterWarning, stacklevel=2)
        named = read_labels(Path(folder))  # of a sequence classifier
        task = TaskConfig(labels=named)
        known = named or tuple(map(str, range(labels)))
        data = TaskData("", "", {}, known, kind=SEQUENCES if named else "")
        base = kinds.load(Config(base=config, task=task), data, device)
    state, structure = peft_folders.read(Path(folder), base)
    return Personal(replace(base, prompt=prompt_for(base, Path(folder))), state, structure)


class ImageModel(nn.Module):
    """A client's whole image model, or its models side by side with their gate, in evaluation mode.

    Attributes:
        labels: names of the C classes.
    """

    def __init__(self, base: Images, structure: Full, state: State):
        super().__init__()
        self.module = base.model_of(structure)
        self.module.load_state_dict({**state.tensors(), **state.extras}, strict=False)  # but for counters
        self.labels, self._head = base.labels, base.head_in(structure)
        self._base = replace(base, model=self.module)  # prepares images where, and in the dtype that, the module is
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, C) of images (N, 1 or 3, H, W) uint8 of any size; `softmax(1)` gives probabilities."""
        return respond(self.module, self._base.prepare(images), self._head).logits


def load_image_model(folder: str | Path, *, device: str = "cpu") -> ImageModel:
    """A client's image model from `adapters/<client>` of a run that trained whole models, or from a copy of it.
    UserError: the folder holds no such model, or one that is damaged."""
    folder = Path(folder)
    settings, processing = (
        read_json(folder / name, "give a folder of an exported image model") for name in (CONFIG, PROCESSING)
    )
    try:
        with torch.random.fork_rng(devices=[]):  # weights are drawn, which the folder's will replace
            labels = tuple(label for _, label in sorted(settings["id2label"].items(), key=lambda item: int(item[0])))
            if "parts" not in settings:
                base, structure = load_images(BaseConfig(name=str(folder), dtype="float32"), labels, device), Full()
            else:
                parts = tuple((name, own) for name, own in settings["parts"])
                structure = Full(parts, settings["answer"], GateShape(**settings.get("gate", {})))
                base = _base(settings, processing, labels, device)
            return ImageModel(base, structure, models.read(folder, structure, base))
    except _DAMAGED as error:
        raise UserError(
            f"{folder / CONFIG} or {PROCESSING} is damaged: {one_line(repr(error))}; give an exported image model"
        ) from error


def load_own(folder: str | Path, module: nn.Module, name: str) -> nn.Module | Personal:
    """A client's model of a run that was given a user's own `module`, by its `name` in the configuration: a copy with
    the client's weights, in evaluation mode; or where adapters were trained, the module with the client's. UserError:
    the folder is damaged, or holds the weights of another module."""
    folder = Path(folder)
    base = Modules.read(module, name, read_json(folder / MODULE))
    if (folder / peft_folders.CONFIG).is_file():
        return load_client(folder, base)
    return base.personal(Full(), models.read(folder, Full(), base))


def _base(settings: dict[str, Any], processing: dict[str, Any], labels: tuple[str, ...], device: str) -> Images:
    """A base from which the parts that config.json names can be made, with any weights."""
    if "checkpoint" in settings:
        check_settings(settings["checkpoint"])
        name, config = "", AutoConfig.for_model(**settings["checkpoint"])
        attn = attention(AutoModelForImageClassification, config, torch.float32, device)
        model: nn.Module = AutoModelForImageClassification.from_config(config, attn_implementation=attn)
    else:
        name = settings["parts"][0][1]
        model = lookup("parts of config.json", name, ARCHITECTURES)(len(labels))
    return Images(
        model=model.to(device), name=name, labels=labels, size=processing["size"]["height"],
        mean=tuple(processing["image_mean"]), std=tuple(processing["image_std"]), head=head_of(model),
    )  # fmt: skip
