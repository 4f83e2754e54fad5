"""Writes, reads, checks and describes PEFT adapter folders; the only file that imports peft."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from llm_fed.bank import Lora, layout, targets
from llm_fed.checkpoint import write_file
from llm_fed.config import AdapterConfig
from llm_fed.errors import RunError, UserError
from llm_fed.models.loading import Base
from llm_fed.state import Layout, State

CONFIG, WEIGHTS, CARD = "adapter_config.json", "adapter_model.safetensors", "README.md"

# The settings of an adapter that are understood here, and those that do not change what it computes. Whatever
# else differs from PEFT's default is a feature that the bank does not have.
_UNDERSTOOD = {"peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "fan_in_fan_out"}
_INERT = {"peft_version", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path", "revision"}
# Initialisations that leave the base's weights alone; the others (PiSSA, OLoRA, LoftQ, ...) change them.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal")


class AdapterWarning(UserWarning):
    """An adapter that fits the base names another one."""


def write(folder: Path, state: State, structure: Lora, base: Base, card: str) -> None:
    """Write one adapter as a folder that `peft.PeftModel.from_pretrained(model, folder)` loads.

    The folder appears complete or not at all. One that exists is replaced when the new one is complete, and
    only if it holds nothing but an adapter.

    Args:
        state: the entries of `bank.layout(base.model, structure)`; their dtype is kept.
        card: the text of README.md, see `model_card`.

    Raises:
        UserError: the folder holds other files than an adapter's.
        RunError: the disk is full, or the folder cannot be written.
    """
    chosen, modules = structure.target_modules, targets(base.model, structure).values()
    alpha = structure.alpha
    settings = _peft_settings(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.name,
        r=structure.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=structure.dropout,
        target_modules=chosen if isinstance(chosen, str) else list(chosen),
        fan_in_fan_out=all(isinstance(module, Conv1D) for module in modules),
        inference_mode=True,
    )
    tensors = {_peft_name(name): tensor.cpu().contiguous() for name, tensor in state.tensors().items()}
    files = {
        # Sets are sorted: their own order changes from process to process.
        CONFIG: json.dumps(settings, indent=2, sort_keys=True, default=sorted).encode(),
        WEIGHTS: save(tensors, metadata={"format": "pt"}),
        CARD: card.encode(),
    }
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= files.keys()):
        raise UserError(f"{folder} holds something else than an adapter and is not replaced; give another folder")
    partial, replaced = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "replaced"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, data in files.items():
            write_file(partial / name, data)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(folder, replaced)
        os.replace(partial, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise RunError(f"cannot write the adapter {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read(folder: Path, base: Base, structure: Lora | None = None) -> tuple[State, Lora]:
    """Read a PEFT LoRA folder, whoever wrote it: its state (at least float32) and its structure.

    An rsLoRA adapter is returned as the plain LoRA that computes the same. An adapter that names another base
    is taken with a warning if all its entries fit: a base has one name on the Hub and others on disks.

    Args:
        structure: the rank, scaling and target modules that the adapter must have (dropout may differ).

    Raises:
        UserError: no adapter folder, damaged files, a feature that is not supported, or an adapter of another
            base, rank or scaling.
    """
    folder = Path(folder)
    found, name = _read_config(folder)
    if structure and not (found.rank == structure.rank and math.isclose(found.scaling, structure.scaling)):
        raise UserError(
            f"the adapter {folder} has rank {found.rank} and alpha {found.alpha:g}, where adapter.rank="
            f"{structure.rank} and adapter.alpha={structure.alpha:g} are expected"
        )
    other_base = f"; it was made for {name!r}, the base here is {base.name!r}" if name not in (base.name, "") else ""
    try:
        expected = layout(base.model, structure or found)
    except UserError as error:
        raise UserError(f"the adapter {folder} does not fit the base: {error}{other_base}") from error
    tensors = _read_tensors(folder / WEIGHTS)
    if difference := _difference(expected, tensors):
        raise UserError(f"the adapter {folder} does not fit the base: {difference}{other_base}")
    if other_base:
        warnings.warn(f"the adapter {folder} fits{other_base}", AdapterWarning, stacklevel=2)
    state = State.of({entry: tensors[_peft_name(entry)] for entry in expected.names})
    if not state.is_finite():
        raise UserError(f"the adapter {folder} holds NaN or infinite numbers; export it again")
    return state, found


def model_card(
    *,
    base: str,
    client: str,
    method: str,
    paper: str,
    metrics: Mapping[str, float],
    config: str,
) -> str:
    """The text of an adapter's README.md, with the front matter that the Hub reads, without a licence field.

    Args:
        base: the base's name; a local folder is named in the text only, as the Hub takes no paths.
        paper: how to cite the method.
        metrics: scores by name, 0-100.
        config: the run's resolved configuration, YAML.
    """
    is_folder = Path(base).expanduser().exists() or base.count("/") > 1
    data = ModelCardData(
        base_model=None if is_folder else base,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["llm_fed", "lora", "federated-learning"],
    )
    scores = "".join(f"| {name} | {value:.2f} |\n" for name, value in metrics.items())
    return f"""---
{data.to_yaml()}
---

# Adapter of client {client}

A personal LoRA adapter of `{base}`, trained by llm_fed with the method `{method}` ({paper}).

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(model, "path/to/this/folder")
```

## Scores of this client

| metric | score (0-100) |
|---|---|
{scores}
## Configuration of the run

```yaml
{config.strip()}
```
"""


def _peft_name(entry: str) -> str:
    return f"base_model.model.{entry}.weight"


def _peft_settings(**settings: Any) -> dict[str, Any]:
    """A LoRA configuration as PEFT writes it, with PEFT's defaults for what is not given."""
    import peft  # here, because the import takes seconds and most commands need no adapter folder

    return peft.LoraConfig(**settings).to_dict()


def _read_config(folder: Path) -> tuple[Lora, str]:
    """The structure in an adapter's configuration, and the name of the base that it was made for (or "")."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} is no adapter folder: it has no {CONFIG}")
    try:
        values = json.loads(path.read_text())
        kind = values["peft_type"]
        unsupported = _unsupported(values)
        chosen = values["target_modules"]
        structure = Lora.from_config(
            AdapterConfig(
                rank=values["r"],
                alpha=values["lora_alpha"] * (math.sqrt(values["r"]) if values.get("use_rslora") else 1),
                dropout=values["lora_dropout"],
                target_modules=chosen if isinstance(chosen, str) else tuple(chosen or ()),
            )
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        raise UserError(f"{path} is no configuration of a LoRA adapter: {error!r}") from error
    if kind != "LORA":
        raise UserError(f"the adapter {folder} is of type {kind}; only LORA is supported")
    if unsupported:
        raise UserError(f"the adapter {folder} is no plain LoRA: {unsupported} is not supported")
    return structure, values.get("base_model_name_or_path") or ""


def _unsupported(values: Mapping[str, Any]) -> str:
    """The first setting that the bank does not have, or nothing; an empty value means that it is off."""
    defaults = _peft_settings()
    for name, value in values.items():
        if name == "init_lora_weights":
            known = value in _INITIALISATIONS
        else:
            known = name in _UNDERSTOOD | _INERT or not value or value == defaults.get(name)
        if not known:
            return f"{name}={value!r}"
    return ""


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, in one dtype of at least float32."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no {WEIGHTS}; only safetensors is read (convert .bin files with PEFT)")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}); fetch or export the adapter again") from error
    dtype = torch.float32
    for tensor in tensors.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _difference(expected: Layout, tensors: Mapping[str, Tensor]) -> str:
    """What of the file is not as expected, or nothing."""
    wanted = {_peft_name(name): shape for name, shape in expected.shape_of.items()}
    for name in [*wanted, *tensors]:
        ours, theirs = wanted.get(name), tuple(tensors[name].shape) if name in tensors else None
        if ours != theirs:
            return f"{name} is {theirs or 'absent'} in the file and {ours or 'absent'} in the base"
    return ""
