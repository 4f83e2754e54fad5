"""A user's own `torch.nn.Module` as the base: it classifies what the data hold, pictures or tensors of one shape."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, lookup, one_line
from llm_fed.kinds import wording
from llm_fed.kinds.images import Images
from llm_fed.models.images import head_of
from llm_fed.models.loading import DTYPES
from llm_fed.models.prompt import Prompt
from llm_fed.models.structure import Structure
from llm_fed.settings import objects
from llm_fed.settings.config import Config
from llm_fed.state import State
from llm_fed.tasks.common import TaskData

FILE = "module.json"  # beside the weights: what the data of the module are
_LOADS = """import llm_fed

result = llm_fed.open_run("path/to/the/run", base=module)  # the module that the run was given
model = result.model("the client's name")  # logits (N, {labels}) = model(inputs)"""
_MODULE = wording.Wording("A personal model", _LOADS, "llm_fed", "image-classification", on_hub=False)
_ADAPTER = wording.Wording("A personal LoRA adapter", _LOADS, "peft", "image-classification", on_hub=False)


@dataclass(kw_only=True)
class Modules(Images):
    """A module whose forward takes one batch (N, ...) and returns logits (N, C). It starts from the weights that it
    has, whether it is trained whole or under adapters; the module itself is not changed but for being frozen."""

    noun: ClassVar[str] = "module of your own"

    shape: tuple[int, ...] = ()  # of one input
    inputs: torch.dtype = torch.uint8  # of the data: uint8 reaches the module divided by 255, floats as they are

    @classmethod
    def load(cls, config: Config, task: TaskData | None, device: str) -> Modules:
        assert task is not None  # see `before_data`
        base, module = config.base, objects.find("base.name", config.base.name)
        if base.quantization or base.activation_checkpointing or base.device_map or base.revision:
            raise UserError("base= gives a module as it is; leave out the settings of base that say how one is loaded")
        dtype = lookup("base.dtype", base.dtype, DTYPES)
        first = next((item for data in task.clients.values() for item in (*data.train, *data.test)), None)
        if first is None or not task.labels:
            raise UserError(
                f"base= is a {type(module).__name__}, which classifies, but the data have no labels; give rows such as "
                '(tensor, 3) or {"image": picture, "label": "cat"}, or for texts base=(model, tokenizer)'
            )
        if next(module.parameters()).dtype != dtype:
            raise UserError(f"base.dtype={base.dtype}, but the module given as base= has another; leave it out")
        shape, inputs = list(first.pixels.shape), str(first.pixels.dtype).removeprefix("torch.")
        return cls.read(module, base.name, {"labels": task.labels, "shape": shape, "inputs": inputs})

    def _check(self) -> None:
        """Refuse a module that does not classify these data. UserError: what it returns."""
        try:
            with torch.no_grad():
                output = self.model(self.prepare(self.blank()))
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(
                f"the module given as base= fails on two inputs of the shape {self.shape}: {str(error).splitlines()[0]}"
            ) from error
        logits = getattr(output, "logits", output)
        expected = (2, len(self.labels))
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(
                f"the module given as base= returns {got} for two inputs; logits of the shape {expected} are "
                f"needed, as the data have {len(self.labels)} labels"
            )

    def blank(self) -> Tensor:
        return torch.zeros(2, *self.shape, dtype=self.inputs)

    def prepare(self, pixels: Tensor) -> Tensor:
        """Inputs (N, ...) of what the data hold: numbers of pictures from 0 to 1, floats as they are."""
        values = pixels.to(self.device)
        dtype = next(self.model.parameters()).dtype
        return values.to(dtype) / 255 if self.inputs == torch.uint8 else values.to(dtype)

    def draw(self, structure: Structure, generator: torch.Generator) -> State:
        state = super().draw(structure, generator)
        for name in structure.whole if structure.fused else ():
            for entry, parameter in self.model.get_submodule(name).named_parameters():
                state[f"{name}.{entry}"].copy_(parameter.detach())
        return state

    def _given(self, module: str, structure: Structure) -> bool:
        return True

    def wording(self, structure: Structure) -> wording.Wording:
        return _ADAPTER if structure.fused else _MODULE

    def settings(self, structure: Structure) -> Mapping[str, Mapping[str, Json]]:
        return {FILE: self._as_json()}

    def beside_adapters(self, prompt: Prompt | None) -> Mapping[str, bytes]:
        return {FILE: json.dumps(self._as_json(), indent=2).encode()}

    def _as_json(self) -> dict[str, Json]:
        dtype = str(self.inputs).removeprefix("torch.")
        kind = type(self.model).__qualname__
        return {"module": kind, "labels": list(self.labels), "shape": list(self.shape), "inputs": dtype}

    @classmethod
    def read(cls, module: nn.Module, name: str, settings: Mapping[str, Any]) -> Modules:
        """Around a module what `settings` says of it. UserError: it is damaged, or the module does not fit."""
        try:
            shape, inputs = tuple(map(int, settings["shape"])), getattr(torch, settings["inputs"])
            labels = tuple(map(str, settings["labels"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{FILE} is damaged: {one_line(repr(error))}; export the model again") from error
        made = cls(
            model=module.eval(), name=name, dtype=next(module.parameters()).dtype, labels=labels, head=head_of(module),
            pretrained=True, size=shape[-1], shape=shape, inputs=inputs,
        )  # fmt: skip
        made._check()
        return made

    def personal(self, structure: Structure, state: State) -> nn.Module:
        """A copy of the module with a client's weights. UserError: clients have several models."""
        if not structure.plain:
            raise UserError("the method gives each client several models side by side, which is for built-in ones")
        own = replace(self, model=copy.deepcopy(self.model))
        own.model.load_state_dict({**state.tensors(), **state.extras}, strict=False)
        return own.model
