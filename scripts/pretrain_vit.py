"""Makes the base of scripts/runs/potara_vit_cpu.yaml: a small vision transformer, trained on an image task.

With --also it learns some classes of a second task too, and the pictures of that task's other classes are written
beside it, as unseen.npz, for clients to train on (`task.name=images task.path=VIT/unseen.npz`).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from llm_fed import tasks
from llm_fed.basics.rng import derive
from llm_fed.kinds.images import Images
from llm_fed.method.requests import moved
from llm_fed.models.images import head_of
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import Picture, TaskData


def make_model(labels: tuple[str, ...], size: int) -> ViTForImageClassification:
    """1.8 M parameters for ten labels, random. Patches of 8 x 8 pixels: of 4 x 4 training would take twice as long."""
    config = ViTConfig(
        image_size=size,
        patch_size=8,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )
    return ViTForImageClassification(config)


def stacked(task: TaskData, split: str) -> tuple[Tensor, Tensor]:
    """All clients' pictures (N, C, H, W) uint8 of a split, and their labels (N,)."""
    pictures: list[Picture] = [picture for client in task.clients.values() for picture in getattr(client, split)]
    return torch.stack([picture.pixels for picture in pictures]), torch.tensor([picture.label for picture in pictures])


def divided(task: TaskData, seen: int, seed: int) -> tuple[list[int], list[int]]:
    """The numbers of `seen` classes drawn at random, and of the others."""
    order = torch.randperm(len(task.labels), generator=torch.Generator().manual_seed(derive(seed, "classes"))).tolist()
    return sorted(order[:seen]), sorted(order[seen:])


def of_classes(task: TaskData, split: str, classes: list[int]) -> tuple[Tensor, Tensor]:
    """`stacked`, of these classes alone, which are numbered from zero."""
    pixels, labels = stacked(task, split)
    number = torch.full((len(task.labels),), -1)
    number[classes] = torch.arange(len(classes))
    kept = number[labels] >= 0
    return pixels[kept], number[labels[kept]]


def write(path: Path, task: TaskData, classes: list[int]) -> None:
    arrays: dict[str, Any] = {}
    for split in ("train", "test"):
        pixels, labels = of_classes(task, split, classes)
        arrays |= {f"x_{split}": pixels.permute(0, 2, 3, 1).numpy(), f"y_{split}": labels.numpy()}
    np.savez(path, **arrays)


def train(base: Images, pixels: Tensor, labels: Tensor, epochs: int, seed: int) -> None:
    """Cross-entropy on augmented batches of 64: AdamW, a linear warm-up over a twentieth of the steps, then cosine to
    zero."""
    generator = torch.Generator().manual_seed(derive(seed, "batches"))
    optimizer = torch.optim.AdamW(base.model.parameters(), lr=1e-3, weight_decay=0.05)
    steps = epochs * math.ceil(len(labels) / 64)
    warmup = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    start = time.perf_counter()
    base.model.train()
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(labels), generator=generator).split(64):
            logits = base.model(base.prepare(moved(pixels[batch], generator, flip=True))).logits
            loss = nn.functional.cross_entropy(logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(base.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch + 1:3d}  loss {total / len(labels):.3f}  {time.perf_counter() - start:.0f} s", flush=True)


@torch.inference_mode()
def accuracy(base: Images, pixels: Tensor, labels: Tensor) -> float:
    """In percent."""
    base.model.eval()
    predicted = [base.model(base.prepare(part)).logits.argmax(1) for part in pixels.split(500)]
    return 100 * float((torch.cat(predicted) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="cifar10", help="an image task whose picture sides are multiples of 8")
    parser.add_argument("--path", help="the data of --task (default: the Hub)")
    parser.add_argument("--also", help="a second image task, of which --classes are learned")
    parser.add_argument("--also-path", help="the data of --also")
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the number of threads fixes the bits
    torch.manual_seed(derive(arguments.seed, "weights"))
    task = tasks.load(TaskConfig(name=arguments.task, path=arguments.path, validation=0.0), arguments.seed)
    data = {split: stacked(task, split) for split in ("train", "test")}
    names = task.labels
    if arguments.also:
        second = tasks.load(TaskConfig(name=arguments.also, path=arguments.also_path, validation=0.0), arguments.seed)
        seen, unseen = divided(second, arguments.classes, arguments.seed)
        for split, (pixels, labels) in data.items():
            more_pixels, more_labels = of_classes(second, split, seen)
            data[split] = torch.cat([pixels, more_pixels]), torch.cat([labels, len(task.labels) + more_labels])
        names += tuple(second.labels[number] for number in seen)
        arguments.out.mkdir(parents=True, exist_ok=True)
        write(arguments.out / "unseen.npz", second, unseen)
    pixels, labels = data["train"]
    model = make_model(names, pixels.shape[-1])
    base = Images(model=model, name="vit", labels=names, size=pixels.shape[-1], head=head_of(model))
    print(f"{model.num_parameters():,} parameters, {len(labels):,} pictures")
    train(base, pixels, labels, arguments.epochs, arguments.seed)
    print(f"accuracy {accuracy(base, *data['test']):.2f} on the test split")
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
