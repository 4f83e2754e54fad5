"""What the steps share: the device, its figures, and models and cohorts with random weights and examples."""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cohort import Bench
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llm_fed.kinds.language import Language, load_base
from llm_fed.settings.config import BaseConfig
from llm_fed.testing.tiny import SPECIAL, tokenizer

GIB = 2**30


class Skipped(Exception):
    """A case cannot be measured here, for a reason that is no fault."""


@dataclass(frozen=True)
class Setting:
    """Where the steps compute.

    Attributes:
        tiny: tiny shapes on the CPU, which try the steps and measure nothing.
        scratch: a folder for models and runs.
        model: the folder of a real base.
        commit: of the code.
    """

    device: torch.device
    card: str
    tiny: bool
    scratch: Path
    model: Path | None
    commit: str = "unknown"

    def clients(self, count: int) -> int:
        """So many, or two to four where shapes are tiny."""
        return {8: 2, 32: 3, 100: 4}[count] if self.tiny else count

    def once(self, run: Callable[[], object]) -> float:
        """The seconds until the device has done it."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def with_peak(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A figure with the most memory that was allocated on the device, and the most that torch took of it, which has
        what graphs keep; on a CPU without."""
        if self.device.type != "cuda":
            return measure()
        self.free()  # what torch has kept of the case before
        torch.cuda.reset_peak_memory_stats()
        figure = measure()
        most = {"peak_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
        return {**figure, **{name: round(held / GIB, 2) for name, held in most.items()}}

    def free(self) -> None:
        """Give back what nothing holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Benches:
    """Cohorts on one base after another; a base is drawn when it is first asked for, and the one before it freed."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self._base = ""
        self._model: PreTrainedModel | None = None

    def of(
        self, base: str, clients: int = 8, steps: int = 4, batch_size: int = 4, log_length: float = 4.4,
        rounds: int = 1, model: PreTrainedModel | None = None,
    ) -> Bench:  # fmt: skip
        """A cohort with examples for so many rounds of so many steps, on a model of these shapes if one is given."""
        if base != self._base or model is not None:
            self._base, self._model = base, model
            self.setting.free()
        tiny = self.setting.tiny
        steps = min(steps, 2) if tiny else steps
        args = argparse.Namespace(
            base=None, data=None, shapes="tiny" if tiny else base, device=str(self.setting.device),
            dtype="float32" if tiny and model is None else "bfloat16", dropout=0.0, lr=5e-4, budget=None,
            clients=self.setting.clients(clients), steps=[steps, *([steps * rounds] if rounds > 1 else [])],
            batch_size=2 if tiny else batch_size, log_length=2.5 if tiny else log_length,
        )  # fmt: skip
        bench = Bench(args, self._model)
        self._model = bench.model
        if model is not None:
            self._base = ""
        return bench


def loaded(setting: Setting, family: str, sizes: Mapping[str, Any], **settings: Any) -> Language:
    """A base of a family with random weights, written to disk and loaded as a run loads it, with settings of `base`."""
    setting.free()
    folder = setting.scratch / "base"
    shutil.rmtree(folder, ignore_errors=True)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer(**SPECIAL).save_pretrained(folder)
    del model
    setting.free()
    base = load_base(BaseConfig(name=str(folder), **settings), setting.device.type)
    shutil.rmtree(folder)
    return base
