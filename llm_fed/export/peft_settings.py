"""Reads and writes adapter_config.json as PEFT understands it; the only file that imports peft."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, one_line
from llm_fed.export.tensors import read_json
from llm_fed.models.base import Base
from llm_fed.models.fused_experts import fused_parameters
from llm_fed.models.lora import Lora, matching, names_of, targets
from llm_fed.settings.config import AdapterConfig
from llm_fed.settings.paths import public

CONFIG = "adapter_config.json"

# Settings that are understood here, and those that do not change what an adapter computes, of older versions of PEFT
# too. Whatever else differs from PEFT's default is a feature that the bank does not have.
_UNDERSTOOD = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "fan_in_fan_out", "modules_to_save",
    "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_dora",
    "target_parameters",
}  # fmt: skip
_INERT = {
    "peft_version", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path", "revision",
    "merge_weights", "runtime_config", "megatron_core", "qalora_group_size",  # the last two say how others are meant
}  # fmt: skip
# Initialisations that leave the base's weights alone; the others (PiSSA, OLoRA, LoftQ, ...) change them.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal")
_MOST_ALPHA = 1e6  # times the rank; none that is trained comes near it, and beyond it float32 overflows
# What is written is what every supported version of PEFT knows: an older one warns of other keys.
_WRITTEN = (
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "r", "lora_alpha",
    "lora_dropout", "target_modules", "fan_in_fan_out", "modules_to_save", "bias", "use_rslora", "use_dora",
    "init_lora_weights", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
)  # fmt: skip
_OF_BASE = ("task_type", "base_model_name_or_path", "revision", "fan_in_fan_out", "modules_to_save")
_DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

T = TypeVar("T")


def _listed(given: str | int | Sequence[str | int] | None) -> tuple[str | int, ...]:
    """None as no names, and one name as a list of it."""
    return (given,) if isinstance(given, str | int) and given != "" else tuple(given or ())


_Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
_ByPattern = BeforeValidator(lambda given: given or {})
_Flag = Annotated[bool, BeforeValidator(lambda given: given or False)]
_Rank = Annotated[int, Field(ge=1)]


class AdapterSettings(BaseModel, frozen=True):
    """What an adapter_config.json says, with PEFT's defaults for what it leaves out; the keys are the aliases."""

    folder: Path
    base: Annotated[str, BeforeValidator(lambda given: given or "")] = Field(alias="base_model_name_or_path")
    revision: str | None
    rank: _Rank = Field(alias="r")
    alpha: float = Field(alias="lora_alpha")
    dropout: float = Field(alias="lora_dropout")
    rslora: _Flag = Field(alias="use_rslora")
    target_modules: str | tuple[str, ...] | None  # as in `Lora`; None: those that PEFT has for the base's architecture
    whole: _Names = Field(alias="modules_to_save")  # modules that are trained whole
    exclude: Annotated[str | tuple[str, ...], BeforeValidator(lambda given: given or ())] = Field(
        alias="exclude_modules"
    )  # modules that are left alone, as in `target_modules`
    # The numbers of the layers that are adapted, which the modules named `layer_lists` hold (none: whichever module has
    # numbers in it); none: all layers.
    layers: Annotated[tuple[int, ...], BeforeValidator(_listed)] = Field(alias="layers_to_transform")
    layer_lists: _Names = Field(alias="layers_pattern")
    # By a regular expression for the end of a name, a rank or alpha of its own.
    ranks: Annotated[dict[str, _Rank], _ByPattern] = Field(alias="rank_pattern")
    alphas: Annotated[dict[str, float], _ByPattern] = Field(alias="alpha_pattern")
    dora: _Flag = Field(alias="use_dora")
    parameters: _Names = Field(alias="target_parameters", default=())  # fused experts that are adapted, as in `Lora`

    def structure(self, model: nn.Module) -> Lora:
        """The structure of the adapter on a model. That of an rsLoRA adapter is the plain LoRA that computes the same.
        UserError: it adapts no layer of the model, or its layers differ in rank or alpha."""
        chosen = self.target_modules
        if chosen is None:
            chosen = () if self.parameters else _usual(model, self.folder)
        matched = names_of(model, chosen)
        names = self._kept(matched, chosen)
        if matched and not names:
            raise UserError(f"the adapter {self.folder} adapts no layer of {type(model).__name__}")
        every = [*names, *fused_parameters(model, self.parameters)]
        ranks, alphas = _own(self.ranks, every, "rank_pattern"), _own(self.alphas, every, "alpha_pattern")
        values = {(ranks.get(name, self.rank), alphas.get(name, self.alpha)) for name in every}
        if len(values) > 1:
            unequal = len({rank for rank, _ in values}) > 1
            key, given = ("rank_pattern", self.ranks) if unequal else ("alpha_pattern", self.alphas)
            raise _unsupported(self.folder, key, dict(given))
        rank, alpha = values.pop() if values else (self.rank, self.alpha)
        try:
            made = Lora.from_config(
                AdapterConfig(
                    rank=rank, alpha=alpha, rslora=self.rslora, dropout=self.dropout, dora=self.dora,
                    target_modules=chosen if names == matched else tuple(names), target_parameters=self.parameters,
                ),
                whole=self.whole,
            )  # fmt: skip
            if not math.isfinite(made.alpha) or made.alpha > _MOST_ALPHA * made.rank:
                raise ValueError(f"lora_alpha={alpha} is over {_MOST_ALPHA:g} times the rank")
        except (*_DAMAGED, UserError) as error:
            raise _not_lora(self.folder, error) from error
        return made

    def scalings(self, names: list[str]) -> dict[str, tuple[int, float]]:
        """By the name of a layer its rank, and what its product B A is multiplied by."""
        ranks, alphas = _own(self.ranks, names, "rank_pattern"), _own(self.alphas, names, "alpha_pattern")
        found = {name: (ranks.get(name, self.rank), alphas.get(name, self.alpha)) for name in names}
        return {name: (r, alpha / (math.sqrt(r) if self.rslora else r)) for name, (r, alpha) in found.items()}

    def _kept(self, names: list[str], chosen: str | tuple[str, ...]) -> list[str]:
        """Those of the matched modules that PEFT adapts."""
        if isinstance(self.exclude, str):
            left_out = set(matching(self.exclude, names, "exclude_modules")) if self.exclude else set()
        else:
            left_out = {name for name in names if any(f".{name}".endswith(f".{part}") for part in self.exclude)}
        left_out |= {name for name in names if any(f".{part}." in f".{name}." for part in self.whole)}
        if self.layers and not isinstance(chosen, str):
            left_out |= {name for name in names if name not in chosen and self._layer(name) not in self.layers}
        return [name for name in names if name not in left_out]

    def _layer(self, name: str) -> int | None:
        """The number of the layer that a module lies in."""
        for number in re.finditer(r"(?<=\.)\d+(?=\.)", name):
            before = name[: number.start() - 1]
            if any(f".{before}".endswith(f".{each}") for each in self.layer_lists) or (
                "." in before and not self.layer_lists
            ):
                return int(number[0])
        return None


def read(folder: Path) -> AdapterSettings:
    """What an adapter's folder says of its settings. UserError: there is no such file, it is damaged or not of a LoRA
    adapter, or it has a setting that the bank does not have or the installed PEFT does not know."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} is not an adapter folder: it has no {CONFIG}")
    values = read_json(path)
    if (kind := values.get("peft_type")) != "LORA":
        raise UserError(f"{path}: the adapter is of type {one_line(str(kind))}; only LORA is supported")
    try:
        _check(folder, values)
        return AdapterSettings(**{**_defaults(), **values, "folder": folder})
    except _DAMAGED as error:
        raise _not_lora(folder, error) from error


def written(structure: Lora, base: Base) -> bytes:
    """What adapter_config.json says."""
    modules, alpha, origin = targets(base.model, structure).values(), structure.alpha, base.source
    settings = _defaults(
        task_type=None if base.head else "CAUSAL_LM",
        base_model_name_or_path=origin.name,
        revision=origin.revision,
        r=structure.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=structure.dropout,
        target_modules=_chosen(base.model, structure),
        fan_in_fan_out=bool(modules) and all(isinstance(module, Conv1D) for module in modules),
        modules_to_save=list(structure.whole) or None,
        use_dora=structure.dora,
        inference_mode=True,
        target_parameters=list(structure.parameters) or None,
    )
    return _text({key: settings[key] for key in (*_WRITTEN, *["target_parameters"] * bool(structure.parameters))})


def merged(parents: Sequence[AdapterSettings], rank: int, layers: Sequence[str]) -> bytes:
    """What adapter_config.json says of an adapter made of several, on these layers and with a scaling of 1; the modules
    are named as the parents name them where all do so alike."""
    first = parents[0]
    chosen = [(each.target_modules, each.exclude, each.layers, each.layer_lists) for each in parents]
    alike = first.target_modules is not None and all(each == chosen[0] for each in chosen)
    given = read_json(first.folder / CONFIG)
    settings = {**_defaults(), **(given if alike else {key: given.get(key) for key in _OF_BASE if key in given})}
    settings |= {
        "r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
        "lora_dropout": 0.0, "inference_mode": True, "target_modules": given["target_modules"] if alike else [*layers],
    }  # fmt: skip
    return _text({key: settings[key] for key in _WRITTEN})


def _text(settings: Mapping[str, Any]) -> bytes:
    """Sets are sorted: their own order changes from process to process."""
    return json.dumps(settings, indent=2, sort_keys=True, default=sorted).encode()


def decisive(alpha: float, whole: Sequence[str], dora: bool = False) -> dict[str, Json]:
    """What of an adapter's settings decides what it computes and is not seen in the shapes of its tensors."""
    return {"lora_alpha": float(alpha), "modules_to_save": list(whole), **({"use_dora": True} if dora else {})}


def public_config(path: Path) -> bytes:
    """An adapter_config.json for others: a base's folder is cut to its last name. UserError: it is damaged."""
    settings = read_json(path)
    return _text(settings | {"base_model_name_or_path": public(settings.get("base_model_name_or_path"))})


def trained_whole(folder: Path, modules: Sequence[str], heads: Sequence[str]) -> UserError:
    """The error of an adapter with modules that are trained whole, other than the `heads` of a classifier."""
    given = one_line(", ".join(map(str, modules)))
    why = "that is not supported for a language model"
    if heads:
        why = f"only the head ({', '.join(heads)}) of a classifier can be"
    return UserError(
        f"the adapter {folder} is not plain LoRA: it has modules_to_save=[{given}], but {why}; merge it into its base "
        "with PEFT, and give the merged model as the base"
    )


def _defaults(**settings: Any) -> dict[str, Any]:
    """A LoRA configuration as PEFT writes it, with PEFT's defaults for what is not given."""
    import peft  # here, because the import takes seconds and most commands need no adapter folder

    return peft.LoraConfig(**settings).to_dict()


def _usual(model: nn.Module, folder: Path) -> str | tuple[str, ...]:
    """The modules that PEFT adapts where a configuration names none."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known  # as in `_defaults`

    kind = model.config.model_type if isinstance(model, PreTrainedModel) else type(model).__name__
    if kind not in known:
        raise UserError(
            f"{folder / CONFIG} names no target_modules, and PEFT has none for {kind}; add the "
            "names of the modules that were adapted"
        )
    usual = known[kind]
    return usual if isinstance(usual, str) else tuple(usual)


def _check(folder: Path, values: Mapping[str, Json]) -> None:
    """Refuse settings that cannot be read; an empty value means that one is off. UserError: which one, and why."""
    defaults = _defaults()
    for key, value in values.items():
        if key == "init_lora_weights":
            harmless = value in _INITIALISATIONS
        else:
            harmless = key in _UNDERSTOOD | _INERT or not value or value == defaults.get(key)
        if not harmless and key in defaults:
            raise _unsupported(folder, key, value)
        if not harmless:
            by = values.get("peft_version")
            written = f" ({one_line(by, 40)})" if isinstance(by, str) and by != version("peft") else ""
            raise UserError(
                f"the adapter {folder} has {one_line(key, 60)}={one_line(repr(value), 100)}, which the installed "
                f"version of PEFT ({version('peft')}) does not know; install the one that wrote it{written}, or delete "
                f"the setting from {CONFIG} if it does not change what the adapter computes"
            )


def _unsupported(folder: Path, key: str, value: Json) -> UserError:
    return UserError(f"the adapter {folder} is not plain LoRA: {key}={one_line(repr(value))} is not supported")


def _not_lora(folder: Path, error: Exception) -> UserError:
    said = repr(error)
    if isinstance(error, ValidationError):
        wrong = ((".".join(map(str, each["loc"])), each["input"], each["msg"]) for each in error.errors())
        said = "; ".join(f"{key}={value!r:.60}: {why}" for key, value, why in wrong)
    return UserError(f"{folder / CONFIG} is not the configuration of a LoRA adapter: {one_line(said)}")


def _own(patterns: Mapping[str, T], names: list[str], key: str) -> dict[str, T]:
    """By name the value of the first pattern that matches its end."""
    values: dict[str, T] = {}
    for pattern, value in patterns.items():
        for name in matching(rf"(.*\.)?({pattern})", names, key):
            values.setdefault(name, value)
    return values


def _chosen(model: nn.Module, structure: Lora) -> str | list[str]:
    """How PEFT is told the target modules; its `all-linear` would include a head that is trained whole."""
    chosen = structure.target_modules
    if not isinstance(chosen, str):
        return list(chosen)
    return "|".join(map(re.escape, targets(model, structure))) if structure.whole else chosen
