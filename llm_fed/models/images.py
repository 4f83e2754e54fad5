"""Image models: built here (`cnn`), or a checkpoint for image classification from a folder or the Hub."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, BaseImageProcessor

from llm_fed.basics import turns
from llm_fed.basics.errors import UserError, lookup
from llm_fed.models import lora
from llm_fed.models.cnn import CNN, CNNS, SIZE
from llm_fed.models.flat import FlatModel
from llm_fed.models.joined import Joined
from llm_fed.models.loading import DTYPES, check_name, explain, settle_dtype
from llm_fed.models.lora import Lora
from llm_fed.models.origin import Origin
from llm_fed.models.resnet import RESNETS
from llm_fed.models.structure import Full, Structure
from llm_fed.settings.config import BaseConfig
from llm_fed.state import Layout, State

OF_ANY_SIZE = RESNETS
ARCHITECTURES: Mapping[str, Callable[[int], nn.Module]] = {"cnn": CNN, **CNNS, **OF_ANY_SIZE}  # their weights are drawn
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
    origin: Origin | None = None  # None where it was made here
    _made: dict[str | Full, nn.Module] = field(default_factory=dict, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def model_of(self, structure: Structure) -> nn.Module:
        """The model, or the models side by side, of `structure`; of adapters the base. It is shared: do not change it.

        Raises:
            UserError: an unknown architecture, or models that cannot answer together.
        """
        if not isinstance(structure, Full):
            return self.model
        if structure not in self._made:
            models = {name: self._architecture(architecture) for name, architecture in structure.parts}
            if structure.plain:
                (self._made[structure],) = models.values()
            else:
                heads = {name: head_of(model) for name, model in models.items()}
                models = {name: copy.deepcopy(model) for name, model in models.items()}  # one may stand there twice
                joined = Joined(models, heads, structure.answer, 3 * self.size**2, structure.gate)
                self._made[structure] = joined.to(self.device, next(self.model.parameters()).dtype).eval()
        return self._made[structure]

    def _architecture(self, name: str) -> nn.Module:
        if not name or name == self.name:
            return self.model
        if name not in self._made:
            lookup("base.clients", name, ARCHITECTURES)
            made = drawn_once(name, len(self.labels))
            self._made[name] = made.to(self.device, next(self.model.parameters()).dtype)
        return self._made[name]

    def head_in(self, structure: Structure) -> str:
        """The name of the last linear layer of the one model of `structure`."""
        return self.head if self.model_of(structure) is self.model else head_of(self.model_of(structure))

    def layout(self, structure: Structure) -> Layout:
        """The entries of a state of `structure`."""
        if isinstance(structure, Full):
            entries = dict(self.model_of(structure).named_parameters())
            return Layout(tuple(entries), tuple(tuple(p.shape) for p in entries.values()))
        return lora.layout(self.model, structure)

    def draw(self, structure: Structure, generator: torch.Generator) -> State:
        """A fresh state: what is not a checkpoint's is drawn from the CPU generator, as torch initialises it."""
        seed = int(torch.randint(2**62, (), generator=generator))
        if not isinstance(structure, Full):
            return self._draw_adapters(structure, seed, generator)
        fresh = copy.deepcopy(self.model_of(structure)).cpu()  # before the seed: making it draws, too
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, module in fresh.named_modules():
                if callable(reset := getattr(module, "reset_parameters", None)) and not self._given(name, structure):
                    reset()
        extras = {name: b.clone() for name, b in fresh.named_buffers() if b.is_floating_point()}
        return State.of(dict(fresh.named_parameters()), extras)

    def _draw_adapters(self, structure: Lora, seed: int, generator: torch.Generator) -> State:
        """Adapters around the base as it is, and a head of their own."""
        state = lora.draw(self.model, structure, generator, next(self.model.parameters()).dtype)
        for name in structure.whole:
            head: Any = copy.deepcopy(self.model.get_submodule(name)).cpu()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                head.reset_parameters()
            for entry, parameter in head.named_parameters():
                state[f"{name}.{entry}"].copy_(parameter.detach())
        return state

    def _given(self, module: str, structure: Full) -> bool:
        """Whether a module's weights are the checkpoint's."""
        if not self.pretrained:
            return False
        places = {f"{name}." if name else "": architecture for name, architecture in structure.parts}
        return any(
            module.startswith(place) and architecture in ("", self.name) and module != place + self.head
            for place, architecture in places.items()
        )

    def flat(self, structure: Structure) -> FlatModel:
        """A copy of the model, or models, of `structure` with all parameters in one row."""
        return FlatModel(copy.deepcopy(self.model_of(structure)))

    def prepare(self, pixels: Tensor) -> Tensor:
        """Inputs (N, 3, size, size) of images (N, 1 or 3, H, W) uint8; grey ones fill all three channels."""
        values = pixels.to(self.device)  # as uint8: in one step torch would convert first, and move four times as much
        values = values.to(next(self.model.parameters()).dtype) / 255
        if values.shape[-2:] != (self.size, self.size):
            values = nn.functional.interpolate(
                values, (self.size, self.size), mode="bilinear", antialias=True, align_corners=False
            )
        mean, std = (values.new_tensor(part).view(1, 3, 1, 1) for part in (self.mean, self.std))
        # Faster on a CPU than channels before pixels (docs/performance.md).
        return ((values - mean) / std).contiguous(memory_format=torch.channels_last)


@turns.taken()
def load_images(config: BaseConfig, labels: tuple[str, ...], device: str, size: int = SIZE) -> ImageBase:
    """The image model that the configuration names, with a logit for each label.

    Args:
        size: height and width of the pictures, for architectures that take any.

    A checkpoint's head is replaced where its number of labels differs. Only safetensors is read; no repository's code
    is run. The model must take `pixel_values` and return logits, as transformers' image classifiers do.

    Raises:
        UserError: neither an architecture that is built here nor a folder or Hub model, or a setting that is for
            language models alone.
    """
    config, _ = settle_dtype(config, device)
    dtype = lookup("base.dtype", config.dtype, DTYPES)
    if config.quantization or config.activation_checkpointing or config.device_map:
        raise UserError(
            "base.quantization, base.activation_checkpointing and base.device_map are for language models; leave them "
            "out"
        )
    if dtype == torch.float16:
        raise UserError("base.dtype=float16 would lose small gradients of image models; use bfloat16 or float32")
    autocast = None if dtype == torch.float32 else dtype
    # Weights stay in float32 and autocast computes in half precision: full models are trained, not only adapters.
    common: dict[str, Any] = {"name": config.name, "labels": labels, "autocast": autocast}
    if config.name in ARCHITECTURES:
        model = drawn_once(config.name, len(labels))
        size = size if config.name in OF_ANY_SIZE else SIZE
        return ImageBase(model.to(device), size=size, mean=HALF, std=HALF, head=head_of(model), pretrained=False,
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
    sizes = settings.get("size") or {}
    side = sizes.get("height") or sizes.get("shortest_edge") or getattr(model.config, "image_size", None) or 224
    return ImageBase(
        model.to(device).eval(), size=int(side), mean=tuple(settings.get("image_mean") or HALF),
        std=tuple(settings.get("image_std") or HALF), head=head, pretrained=True,
        origin=Origin.of(config), **common,
    )  # fmt: skip


def drawn_once(name: str, classes: int) -> nn.Module:
    """A model of an architecture that is built here, in evaluation mode; its weights are the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ARCHITECTURES[name](classes).eval()


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
