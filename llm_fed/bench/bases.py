"""Base models as configurations name them."""

from __future__ import annotations

import gc
from copy import copy

import torch

from llm_fed import kinds, tasks
from llm_fed.engine.capture import Captures
from llm_fed.kinds import Kind
from llm_fed.runtime.launch import choose_device
from llm_fed.runtime.portable import fingerprint
from llm_fed.settings.config import BaseConfig, Config


def identity(base: Kind) -> str:
    """What all machines of a federation must have in common: the base's first weights, and what its kind adds."""
    return fingerprint(base.identity, base.model)


class Bases:
    """Loads bases as they are requested, one in memory at a time; `loads` counts them. `reuse`: whether the runs on a
    base also share the graphs of their training passes."""

    def __init__(self, reuse: bool = False) -> None:
        self.loads, self._reuse = 0, reuse
        self._key: tuple[BaseConfig, str, str, str | None, int | None, tuple[str, ...] | None] | None = None
        self._base: Kind | None = None

    def of(self, config: Config) -> Kind:
        task = config.task  # labels are the head's, and the size of images may be the model's
        key = config.base, config.device, task.name, task.path, task.image_size, task.labels
        if self._base is None or key != self._key:
            self._key = self._base = None
            data = tasks.load(task, config.federation_seed, config.evaluation_seed, absent=True)
            self._base = kinds.load(config, data, choose_device(config.device))
            if self._reuse:
                self._base = copy(self._base)  # which may be an object of a user's own
                self._base.captures = Captures()
            self.loads += 1
            self._key = key
        return self._base

    def give_back(self) -> None:
        """Forget the base, so that others may have its memory."""
        self._key = self._base = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
