"""What an adapter's folder says of the base that it was trained on, and the base as it was then."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from llm_fed.basics.errors import UserError, one_line
from llm_fed.export.peft_settings import CONFIG, trained_whole
from llm_fed.export.tensors import read_json
from llm_fed.models import labels
from llm_fed.models.images import ARCHITECTURES
from llm_fed.models.loading import check_name, config_of
from llm_fed.models.origin import Origin
from llm_fed.models.prompt import Prompt, read_prompt
from llm_fed.settings.config import BaseConfig


def read_origin(folder: Path) -> Origin | None:
    """The base of an adapter as its prompt.json names it, else as its adapter_config.json does; None where neither
    does. If the latter was changed since, it counts. UserError: a file is damaged."""
    prompt = read_prompt(folder)
    said = prompt.origin if prompt else None
    if not (folder / CONFIG).is_file():
        return said
    settings = read_json(folder / CONFIG)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not (name and isinstance(name, str)) or (said and said.name == name):
        return said
    found = Origin.of(BaseConfig(name=name, revision=revision if isinstance(revision, str) else None))
    return replace(found, quantization=said.quantization if said else None, dtype=said.dtype if said else None)


def common_base(origins: Mapping[str, Origin | None]) -> str:
    """Where the base lies that all these adapters are of, by what a message calls them; "" where none says it.
    UserError: they are of different bases."""
    known = {name: origin for name, origin in origins.items() if origin}
    for name, origin in known.items():
        first = next(iter(known))
        if not origin.same_weights(known[first]):
            raise UserError(
                f"{first} is an adapter of {known[first].name!r} and {name} one of {origin.name!r}: only adapters of "
                "one base can be merged; if both are the same model, give --base"
            )
    return next(iter(known.values())).name if known else ""


def say_differences(
    prompts: Mapping[str, Prompt],
    origins: Mapping[str, Origin | None],
    note: Callable[[str], None],
    keys: Collection[str] = (),
) -> None:
    """Say where the parents of a merge differ in what ends an answer, or in how their base was loaded: the merge has
    what the first one says. `prompts`, `origins`: by what a message calls a parent. `keys`: the settings that were
    given explicitly, which count for both."""
    lengths = {name: prompt.max_new_tokens for name, prompt in prompts.items()}
    ends = {name: list(prompt.stop) for name, prompt in prompts.items()}
    loaded = {
        name: origin.quantization or "full precision" for name, origin in origins.items() if origin and origin.dtype
    }
    for key, values in (("eval.max_new_tokens", lengths), ("stop_token_ids", ends), ("base.quantization", loaded)):
        said = [f"{value} of {name}" for name, value in values.items()]
        if key not in keys and any(value != next(iter(values.values())) for value in values.values()):
            note(f"the adapters differ in {key}: {', '.join(said)}; the merge has {said[0]}")


def as_trained(
    config: BaseConfig, origin: Origin | None, keys: Collection[str], note: Callable[[str], None]
) -> BaseConfig:
    """A base as an adapter was trained on it: with its quantisation, its dtype and, under its name, its revision.

    Args:
        origin: what the adapter's folder says.
        keys: the settings that were given explicitly, which stay.
        note: takes a line for the user, where the base is quantised, or should be and cannot.
    """
    if origin is None:
        return config
    if origin.dtype not in (None, "auto") and "base.dtype" not in keys:
        config = replace(config, dtype=origin.dtype)  # type: ignore[arg-type]  # checked when the base is loaded
    if origin.revision and origin.name == config.name and "base.revision" not in keys:
        config = replace(config, revision=origin.revision)
    if origin.quantization is None or "base.quantization" in keys:
        return config
    if importlib.util.find_spec("bitsandbytes") is None:
        note(
            f"the adapter was trained on the base in {origin.quantization}, but bitsandbytes is not installed, so the "
            f"base is in {config.dtype} here; scores and answers may differ"
        )
        return config
    note(f"the base is quantised to {origin.quantization}, as when the adapter was trained")
    return replace(config, quantization=origin.quantization)  # type: ignore[arg-type]  # as above


def check_text(folder: Path, base: BaseConfig) -> None:
    """Refuse a PEFT folder with modules that are trained whole, where no task says that it is a classifier's, and with
    which labels. UserError: it has some; or the base cannot be found."""
    modules = read_json(folder / CONFIG).get("modules_to_save") if (folder / CONFIG).is_file() else None
    if not modules:
        return
    named = list(modules) if isinstance(modules, list) else [modules]
    classifies = (folder / labels.FILE).is_file()
    if base.name not in ARCHITECTURES and not classifies:
        config = config_of(base.name, check_name(base.name), base.revision, family=False)
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise trained_whole(folder, named, ())
    head = one_line(", ".join(map(str, named)))
    raise UserError(
        f"the adapter {folder} has a classification head ({head}), so it is for "
        f"{'a sequence classifier' if classifies else 'an image model, or a sequence classifier'}; give --task NAME "
        "for its labels, and --data PATH if the data are not on the Hub"
    )
