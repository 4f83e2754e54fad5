"""Small pictures that can be told apart, models for them, parties that hold them, and a whole run of them."""

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from llm_fed.engine.engine import Engine
from llm_fed.kinds.images import Images
from llm_fed.method.client import Client
from llm_fed.method.server import Server
from llm_fed.method.site import Data
from llm_fed.models.cnn import CNN
from llm_fed.models.images import head_of
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Full, Structure
from llm_fed.runtime.local import drive
from llm_fed.settings.config import LocalConfig
from llm_fed.state import State
from llm_fed.tasks.common import Picture
from llm_fed.testing.tiny import CLASSES, arrays, drawn, pictures

LORA = Lora(rank=2, alpha=6, dropout=0.0, target_modules=("q_proj", "v_proj"), whole=("classifier",))
LOCAL = LocalConfig(steps=None, epochs=1, batch_size=8, optimizer="adam")


def npz(path: Path, train: int = 36, test: int = 18, seed: int = 0, classes: int = CLASSES, size: int = 32) -> Path:
    """A file for `task.path`."""
    (x_train, y_train), (x_test, y_test) = (arrays(n, seed + i, classes, size) for i, n in enumerate((train, test)))
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)  # type: ignore[arg-type]
    return path


def around(make: Callable[[], nn.Module], size: int, dtype: torch.dtype) -> Images:
    """A base of a model for pictures of `size` pixels."""
    model, labels = drawn(make, 1), tuple(f"class {label}" for label in range(CLASSES))
    return Images(model=model.to(dtype).eval(), name="tiny", labels=labels, size=size, head=head_of(model), dtype=dtype,
                  pretrained=not isinstance(model, CNN))  # fmt: skip


def cnn(dtype: torch.dtype = torch.float64) -> Images:
    return around(lambda: CNN(CLASSES), 32, dtype)


def resnet(dtype: torch.dtype = torch.float64) -> Images:
    """Basic layers with BatchNorm, 16 x 16 pixels."""
    return around(lambda: ResNetForImageClassification(resnet_config()), 16, dtype)


def vit(dtype: torch.dtype = torch.float64, **changes: Any) -> Images:
    return around(lambda: ViTForImageClassification(vit_config(**changes)), 16, dtype)


def resnet_config() -> ResNetConfig:
    return ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 24], depths=[1, 1], layer_type="basic", num_labels=CLASSES  # type: ignore[call-arg]
    )  # fmt: skip


def vit_config(**changes: Any) -> ViTConfig:
    return ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, image_size=16, patch_size=8,
        qkv_bias=False, initializer_range=0.2, num_labels=CLASSES, **changes,  # type: ignore[call-arg]
    )  # fmt: skip


def of_two_domains(folder: Path) -> Path:
    """Pictures of four classes, and beside them of six others."""
    npz(folder / "other.npz", train=12, classes=6, seed=9)
    return npz(folder / "own.npz")


def save(base: Images, folder: Path) -> Path:
    """A model folder for `base.name`."""
    base.model.save_pretrained(folder)  # type: ignore[operator]
    settings = {"size": {"shortest_edge": base.size}, "image_mean": base.mean, "image_std": base.std}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


MAKERS = {"cnn": cnn, "resnet": resnet, "vit": vit}
BATCHES = [pictures(size, seed) for seed, size in enumerate((6, 1, 4, 6, 3))]


def party(
    base: Images,
    train: Sequence[Picture],
    id: str = "c0",
    structure: Structure | None = None,
    local: LocalConfig = LOCAL,
    lr: float = 1e-3,
) -> Any:
    """A client, or the site \"server\", in round 1."""
    structure = structure or Full()
    kind = Server if id == "server" else Client
    site = kind(id, structure, local, 0, partial(base.draw, structure), Data(train, num_labels=CLASSES))
    site.begin(1, lr)
    return site


def answer(engine: Engine, work: Any) -> Any:
    """What one site's coroutine returns; an exception that ended it is raised."""
    (outcome,) = drive({"site": work}, engine.execute).values()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def loaded(base: Images, state: State) -> nn.Module:
    """A copy of the base's module with the values of a state of the whole model."""
    module = copy.deepcopy(base.model)
    module.load_state_dict({**state.tensors(), **state.extras}, strict=False)
    return module


def cross_entropy(base: Images, module: nn.Module, batch: Any) -> Tensor:
    logits = module(pixel_values=base.prepare(torch.stack([picture.pixels for picture in batch])))
    labels = torch.tensor([picture.label for picture in batch])
    return nn.functional.cross_entropy(getattr(logits, "logits", logits), labels)


def stock(base: Images, state: State, dropout: float = 0.0) -> peft.PeftModel:
    """Stock PEFT with the head trained whole, at the values of `state`."""
    config = peft.LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, lora_dropout=dropout, target_modules=["q_proj", "v_proj"],
        modules_to_save=["classifier"],
    )  # fmt: skip
    wrapped = peft.get_peft_model(copy.deepcopy(base.model), config)
    with torch.no_grad():
        for name, parameter in trained_by(wrapped).items():
            parameter.copy_(state[name])
    return wrapped


def trained_by(wrapped: peft.PeftModel) -> dict[str, nn.Parameter]:
    return {
        name.removeprefix("base_model.model.")
        .replace(".modules_to_save.default", "")
        .removesuffix(".default.weight"): p
        for name, p in wrapped.named_parameters()
        if p.requires_grad
    }


def assert_state(found: State, expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, value in {**found.tensors(), **found.extras}.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=partial("{}: {}".format, name))


def tree(path: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of a whole run as nested values; a section in `changes` is laid over the one here."""
    tree: dict[str, Any] = {
        "rounds": 3,
        "base": {"name": "cnn", "dtype": "float32"},
        "adapter": None,
        "task": {"name": "images", "path": str(path), "validation": 0.2, "partition": {"kind": "iid", "clients": 3}},
        "method": {"name": "fedavg"},
        "local": {"steps": None, "epochs": 1, "batch_size": 8, "lr": 3e-3, "lr_end": 1e-3, "optimizer": "adam"},
        "eval": {"every": 1, "cross": False, "base": False},
        "device": "cpu",
    }
    for key, value in changes.items():
        laid_over = key != "method" and isinstance(value, dict) and isinstance(tree.get(key, {}), dict)
        tree[key] = {**tree.get(key, {}), **value} if laid_over else value
    return tree
