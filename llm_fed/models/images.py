"""Image models: built here (`cnn`), or a checkpoint for image classification from a folder or the Hub."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, BaseImageProcessor

from llm_fed import adapters, lora
from llm_fed.config import BaseConfig
from llm_fed.errors import UserError, lookup
from llm_fed.flat import FlatModel
from llm_fed.models.cnn import CNN, SIZE
from llm_fed.models.loading import DTYPES, check_name, explain
from llm_fed.state import Layout, State
from llm_fed.structure import Full, Structure

ARCHITECTURES = {"cnn": CNN}  # by base.name; their weights are drawn
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation of pixels, where a checkpoint says nothing


@dataclass
class ImageBase:
    """An image classifier and how pixels are made ready for it."""

    model: nn.Module
    name: str  # as configured
    labels: tuple[str, ...]  # by index of the logits
    size: int  # height and width of its inputs, in pixels
    mean: tuple[float, ...]  # per channel, of pixels in 0-1
    std: tuple[float, ...]
    head: str  # the name of its last linear layer
    pretrained: bool  # whether its weights, but for the head, are a checkpoint's
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def layout(self, structure: Structure) -> Layout:
        """The entries of a state of `structure`."""
        if isinstance(structure, Full):
            entries = dict(self.model.named_parameters())
            return Layout(tuple(entries), tuple(tuple(p.shape) for p in entries.values()))
        return lora.layout(self.model, structure)

    def draw(self, structure: Structure, generator: torch.Generator) -> State:
        """A fresh state: what is not a checkpoint's is drawn from the CPU generator, as torch initialises it."""
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = copy.deepcopy(self.model).cpu()
            for module in [fresh.get_submodule(self.head)] if self.pretrained else fresh.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        if isinstance(structure, Full):
            extras = {name: b.clone() for name, b in fresh.named_buffers() if b.is_floating_point()}
            return State.of(dict(fresh.named_parameters()), extras)
        return lora.draw(fresh, structure, generator, next(fresh.parameters()).dtype)

    def flat(self, structure: Structure) -> FlatModel:
        """The model with the parameters of `structure` in one row, around the frozen rest, which is shared."""
        if isinstance(structure, Full):
            module = copy.deepcopy(self.model)
            return FlatModel(module, dict(module.named_parameters()))
        module = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        with torch.random.fork_rng(devices=[]):  # PEFT draws values, which a state will replace
            return FlatModel(*adapters.inject(module, structure))

    def prepare(self, pixels: Tensor) -> Tensor:
        """Inputs (N, 3, size, size) of images (N, 1 or 3, H, W) uint8; grey ones fill all three channels."""
        values = pixels.to(self.device, next(self.model.parameters()).dtype) / 255
        if values.shape[-2:] != (self.size, self.size):
            values = nn.functional.interpolate(
                values, (self.size, self.size), mode="bilinear", antialias=True, align_corners=False
            )
        mean, std = (values.new_tensor(part).view(1, 3, 1, 1) for part in (self.mean, self.std))
        # Faster on a CPU than channels before pixels (docs/performance.md).
        return ((values - mean) / std).contiguous(memory_format=torch.channels_last)


def load_images(config: BaseConfig, labels: tuple[str, ...], device: str) -> ImageBase:
    """The image model that the configuration names, with a logit for each label.

    A checkpoint's head is replaced where its number of labels differs. Only safetensors is read; no repository's code
    is run. The model must take `pixel_values` and return logits, as transformers' image classifiers do.

    Raises:
        UserError: neither an architecture that is built here nor a folder or Hub model, or a setting that is for
            language models alone.
    """
    dtype = lookup("base.dtype", config.dtype, DTYPES)
    if config.quantization or config.activation_checkpointing:
        raise UserError("base.quantization and base.activation_checkpointing are for language models; leave them out")
    if dtype == torch.float16:
        raise UserError("base.dtype=float16 would lose small gradients of image models; use bfloat16 or float32")
    autocast = None if dtype == torch.float32 else dtype
    # Weights stay in float32 and autocast computes in half precision: full models are trained, not only adapters.
    common: dict[str, Any] = {"name": config.name, "labels": labels, "autocast": autocast}
    if config.name in ARCHITECTURES:
        model = ARCHITECTURES[config.name](len(labels))
        return ImageBase(model.to(device), size=SIZE, mean=HALF, std=HALF, head=head_of(model), pretrained=False,
                         **common)  # fmt: skip
    folder = check_name(config.name, also=ARCHITECTURES)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of a replaced head, which every federation draws anew
            loaded: Any = AutoModelForImageClassification.from_pretrained(
                folder, revision=config.revision, num_labels=len(labels), ignore_mismatched_sizes=True,
                dtype=torch.float32, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # transformers and safetensors share no class of errors
        built = "" if Path(folder).is_dir() else f" Built here: {', '.join(ARCHITECTURES)}."
        raise UserError(explain(config.name, error, "an image classifier") + built) from error
    model, report = loaded
    head = head_of(model)
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(f"{head}."))
    if missing:
        raise UserError(
            f"base.name={config.name!r} has no weights for {len(missing)} tensors of {type(model).__name__}, "
            f"e.g. {missing[0]}; give a complete image model"
        )
    settings = _processing(folder, config.revision)
    size = settings.get("size") or {}
    side = size.get("height") or size.get("shortest_edge") or getattr(model.config, "image_size", None) or 224
    return ImageBase(
        model.to(device).eval(), size=int(side), mean=tuple(settings.get("image_mean") or HALF),
        std=tuple(settings.get("image_std") or HALF), head=head, pretrained=True, **common,
    )  # fmt: skip


def head_of(model: nn.Module) -> str:
    """The name of the last linear layer."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError(f"{type(model).__name__} has no linear layer that could be its head")
    return linear[-1]


def _processing(folder: str, revision: str | None) -> Mapping[str, Any]:
    """What the checkpoint's preprocessor_config.json says; empty where it has none."""
    try:
        settings, _ = BaseImageProcessor.get_image_processor_dict(folder, revision=revision)
    except OSError:
        return {}
    return settings
