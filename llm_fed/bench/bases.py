"""Base models as configurations name them."""

from __future__ import annotations

from typing import Any

from llm_fed import tasks
from llm_fed.models.images import ImageBase, load_images
from llm_fed.models.loading import Base, load_base
from llm_fed.runtime.launch import choose_device
from llm_fed.runtime.portable import fingerprint
from llm_fed.settings.config import BaseConfig, Config
from llm_fed.tasks.common import TaskData


def load(config: Config, task: TaskData, device: str) -> Base | ImageBase:
    """The base that the run's sites share: an image model where the task is one of pictures."""
    if task.labels:
        known = (picture.pixels.shape[-1] for data in task.clients.values() for picture in data.train)
        size = next(known, config.task.image_size or 0)
        return load_images(config.base, task.labels, device, size)
    return load_base(config.base, device)


def identity(base: Base | ImageBase) -> str:
    """What all machines of a federation must have in common: the base's first weights, and of pictures their classes
    and their size."""
    return fingerprint((base.labels, base.size) if isinstance(base, ImageBase) else (), base.model)


class Bases:
    """Loads bases as they are asked for, one in memory at a time; `loads` counts them."""

    def __init__(self) -> None:
        self.loads = 0
        self._key: tuple[BaseConfig, str, str, str | None, int | None, tuple[str, ...] | None] | None = None
        self._base: Any = None

    def of(self, config: Config) -> Base | ImageBase:
        task = config.task  # of images, their labels are the head's, and their size may be the model's
        key = config.base, config.device, task.name, task.path, task.image_size, task.labels
        if key != self._key:
            self._key = self._base = None
            data = tasks.load(task, config.federation_seed, config.evaluation_seed, absent=True)
            self._base = load(config, data, choose_device(config.device))
            self.loads += 1
            self._key = key
        return self._base
