"""Image models: with adapters, or trained whole, alone or side by side."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification

from llm_fed.basics import turns
from llm_fed.basics.errors import UserError, lookup
from llm_fed.engine.memory import free_memory
from llm_fed.kinds import wording
from llm_fed.kinds.kind import AsTheyAre, Encoding, Kind, Labelled, Note
from llm_fed.models.base import freeze
from llm_fed.models.cnn import SIZE
from llm_fed.models.images import ARCHITECTURES, HALF, RESNETS, drawn_once, head_of, processing
from llm_fed.models.joined import Answer, Joined, respond
from llm_fed.models.loading import DTYPES, attention, check_name, explain, read_settings, settle_dtype
from llm_fed.models.lora import Lora, targets
from llm_fed.models.origin import Origin
from llm_fed.models.structure import Full, Structure
from llm_fed.settings.config import BaseConfig, Config
from llm_fed.settings.paths import public
from llm_fed.tasks.common import Picture, TaskData, pixels_of
from llm_fed.tasks.common import labels_of as labels_of_pictures

CONFIG, PROCESSING = "config.json", "preprocessor_config.json"  # beside the weights of a whole model
PATCH = 16  # pixels


@dataclass(kw_only=True)
class Images(Kind):
    """An image classifier, and how pixels are made ready for it."""

    noun: ClassVar[str] = "image model"
    whole: ClassVar[bool] = True
    augments: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ()

    size: int = SIZE  # height and width of its inputs, in pixels
    mean: tuple[float, ...] = HALF  # per channel, of pixels in 0-1
    std: tuple[float, ...] = HALF
    pretrained: bool = False  # whether its weights, but for the head, are a checkpoint's
    _made: dict[str | Structure, nn.Module] = field(default_factory=dict, init=False, repr=False)
    _examples: dict[Structure, Pictures] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def load(cls, config: Config, task: TaskData | None, device: str) -> Images:
        assert task is not None  # see `before_data`
        known = (picture.pixels.shape[-1] for data in task.clients.values() for picture in data.train)
        return load_images(config.base, task.labels, device, next(known, config.task.image_size or SIZE))

    @classmethod
    def check_network(cls, config: Config) -> None:
        super().check_network(config)
        if config.task.image_size is None:
            raise UserError("over a network the server sees no picture; set task.image_size to their height and width")
        if config.base.clients and isinstance(config.network.clients, int):
            raise UserError(
                "base.clients goes by the clients' order, which over a network is that of network.clients; list their "
                "names there"
            )

    @property
    def identity(self) -> tuple[object, ...]:
        return self.labels, self.size

    def examples(self, structure: Structure) -> Pictures:
        if structure not in self._examples:
            self._examples[structure] = Pictures.of(self, structure)
        return self._examples[structure]

    def encoding(self, config: Config, task: TaskData, reads: str, note: Note) -> Encoding:
        """Of pictures whose pixels lie in the memory of the device that computes, where they fit: no step waits."""
        parties = [*task.clients.values(), *([task.server] if task.server else [])]
        size = sum(picture.pixels.nbytes for data in parties for split in data.splits.values() for picture in split)
        if self.device.type == "cpu":
            return super().encoding(config, task, reads, note)
        if size > free_memory(self.device) // 4:
            note(
                f"the pictures ({size / 2**30:.1f} GiB) would fill over a quarter of the free memory of {self.device}, "
                "so they stay in the host's memory, and each batch is copied to the device"
            )
            return super().encoding(config, task, reads, note)
        return AsTheyAre(config, partial(placed, device=self.device))

    def model_of(self, structure: Structure) -> nn.Module:
        """The model, or the models side by side, of `structure`; of adapters the base. It is shared: do not change it.
        UserError: an unknown architecture, or models that cannot answer together."""
        if structure.fused:
            return self.model
        assert isinstance(structure, Full)
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

    def head_in(self, structure: Structure) -> str:
        model = self.model_of(structure)
        return self.head if model is self.model else head_of(model)

    def _architecture(self, name: str) -> nn.Module:
        if not name or name == self.name:
            return self.model
        if name not in self._made:
            lookup("base.clients", name, ARCHITECTURES)
            made = drawn_once(name, len(self.labels))
            self._made[name] = made.to(self.device, next(self.model.parameters()).dtype)
        return self._made[name]

    def _given(self, module: str, structure: Structure) -> bool:
        """Whether a module's weights are the checkpoint's."""
        locations = {f"{name}." if name else "": architecture for name, architecture in structure.parts}
        return self.pretrained and any(
            module.startswith(location) and architecture in ("", self.name) and module != location + self.head
            for location, architecture in locations.items()
        )

    def blank(self) -> Tensor:
        """Two empty inputs, as `prepare` takes them."""
        return torch.zeros(2, 3, self.size, self.size, dtype=torch.uint8)

    def prepare(self, pixels: Tensor) -> Tensor:
        """Inputs (N, 3, size, size) of images (N, 1 or 3, H, W) uint8; grey ones fill all three channels."""
        values = pixels.to(self.device)  # as uint8: in one step torch would convert first, and move four times as much
        values = values.to(next(self.model.parameters()).dtype) / 255
        if values.shape[-2:] != (self.size, self.size):
            values = nn.functional.interpolate(
                values, (self.size, self.size), mode="bilinear", antialias=True, align_corners=False
            )
        mean, std = (values.new_tensor(part).view(1, 3, 1, 1) for part in (self.mean, self.std))
        # Faster on a CPU than channels before pixels (docs/results/log/performance.md).
        return ((values - mean) / std).contiguous(memory_format=torch.channels_last)

    def wording(self, structure: Structure) -> wording.Wording:
        if structure.fused:
            return wording.IMAGE_ADAPTER if structure.plain else wording.IMAGE_EXPERTS
        if not structure.plain:
            return wording.IMAGE_MODELS
        return wording.IMAGE_MODEL if self._is_checkpoint(structure) else wording.BUILT

    def _is_checkpoint(self, structure: Structure) -> bool:
        """Whether a whole model is one that transformers loads."""
        architectures = {architecture for _, architecture in structure.parts}
        return structure.plain and self.pretrained and architectures <= {"", self.name}

    def settings(self, structure: Structure) -> Mapping[str, Mapping[str, Any]]:
        return {
            CONFIG: json.loads(json.dumps(self._config(structure), sort_keys=True, default=str)),
            PROCESSING: {
                "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_resize": True,
                "size": {"height": self.size, "width": self.size}, "image_mean": self.mean, "image_std": self.std,
            },
        }  # fmt: skip

    def _config(self, structure: Structure) -> dict[str, Any]:
        """Transformers' words for a checkpoint's model, else [name, architecture] of each part."""
        labels = dict(enumerate(self.labels))
        # It names the folder that it was loaded from.
        checkpoint: dict[str, Any] = public(self.model.config.to_dict()) if self.pretrained else {}
        if self._is_checkpoint(structure):
            return {**checkpoint, "id2label": labels, "label2id": {name: index for index, name in labels.items()}}
        assert isinstance(structure, Full)
        # A checkpoint is none of our architectures, and its name may be a path here: its configuration, then.
        unnamed = ("", self.name) if self.pretrained else ()
        parts = [[name, "" if own in unnamed else own or self.name] for name, own in structure.parts]
        settings: dict[str, Any] = {"parts": parts, "answer": structure.answer, "id2label": labels}
        if structure.answer == "gate":
            settings["gate"] = asdict(structure.gate)
        return settings | ({"checkpoint": checkpoint} if "" in dict(parts).values() else {})

    def classified(self, given: Tensor) -> list[Picture]:
        """Of images (N, 1 or 3, height, width) uint8."""
        return [Picture(image, -1, "") for image in given]


@turns.taken()
def load_images(config: BaseConfig, labels: tuple[str, ...], device: str, size: int = SIZE) -> Images:
    """The image model that the configuration names, with a logit for each label; `size`: height and width of the
    pictures, for architectures that take any. A checkpoint's head is replaced where its number of labels differs. Only
    safetensors is read; no repository's code is run. The model must take `pixel_values` and return logits, as
    transformers' image classifiers do. UserError: neither an architecture that is built here nor a folder or Hub model,
    or a setting that is for language models alone."""
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
        size = size if config.name in RESNETS else SIZE
        return Images(model=model.to(device), size=size, head=head_of(model), **common)
    folder = check_name(config.name, also=ARCHITECTURES)
    try:
        settings = read_settings(folder, config.revision)
        attn = attention(AutoModelForImageClassification, settings, torch.float32, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of a replaced head, which every federation draws anew
            loaded: Any = AutoModelForImageClassification.from_pretrained(
                folder, revision=config.revision, num_labels=len(labels), ignore_mismatched_sizes=True,
                dtype=torch.float32, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
                attn_implementation=attn,
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
    reads = processing(folder, config.revision)
    sizes = reads.get("size") or {}
    side = sizes.get("height") or sizes.get("shortest_edge") or getattr(model.config, "image_size", None) or 224
    return Images(
        model=model.to(device).eval(), size=int(side), mean=tuple(reads.get("image_mean") or HALF),
        std=tuple(reads.get("image_std") or HALF), head=head, pretrained=True,
        origin=Origin.of(config), **common,
    )  # fmt: skip


def placed(pictures: Sequence[Picture], device: torch.device) -> tuple[Picture, ...]:
    """The pictures with their pixels on `device`, as views of one tensor."""
    if not pictures:
        return ()
    pixels = pixels_of(pictures).to(device)
    return tuple(replace(picture, pixels=own) for picture, own in zip(pictures, pixels.unbind(0), strict=True))


@dataclass(frozen=True)
class PictureBatch:
    """Labelled images; every row is one target."""

    pixels: Tensor  # (N, 1 or 3, H, W) uint8
    labels: Tensor  # (N,)

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.labels))


@dataclass(frozen=True, kw_only=True)
class Pictures(Labelled):
    """Pictures of an image base; the label of each is its one target."""

    base: Images
    tokens: int  # that a picture counts as, see `of`
    last: str  # the name of the last linear layer

    @classmethod
    def of(cls, base: Images, structure: Structure) -> Pictures:
        """A picture counts as the most tokens that it is in any adapted layer - in a ViT its patches and one more - and
        at least as one token for 16 x 16 pixels, so that layers after a pooling do not make a picture look free.
        UserError: an adapted layer does not read one row per picture, hence cannot know whose adapter is whose."""
        most, seen = max(1, (base.size // PATCH) ** 2), {}
        adapted = targets(base.model, structure) if isinstance(structure, Lora) and structure.target_modules else {}
        handles = [
            module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0].shape}))
            for name, module in adapted.items()
        ]
        try:
            if adapted:
                freeze(base.model)
                with torch.inference_mode():
                    base.model(base.prepare(base.blank()))
        finally:
            for handle in handles:
                handle.remove()
        for name, shape in seen.items():
            if shape[0] != 2:
                raise UserError(
                    f"adapter.target_modules matches {name} of {base.name!r}, which reads {shape[0] // 2} rows per "
                    "picture, where an adapter needs one; choose other layers"
                )
            most = max(most, shape[1:-1].numel())
        return cls(base=base, tokens=most, last=base.head_in(structure))

    def length(self, picture: Picture) -> int:
        return self.tokens

    def collate(self, pictures: Sequence[Picture]) -> PictureBatch:
        return PictureBatch(pixels_of(pictures), labels_of_pictures(pictures))

    def answer(self, model: nn.Module, batch: PictureBatch) -> Answer:
        return respond(model, self.base.prepare(batch.pixels), self.last)
