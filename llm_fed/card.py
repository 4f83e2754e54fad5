"""The model card of a personal adapter: what the Hub, and whoever is handed the folder, reads first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

_LOAD = """from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(model, "path/to/this/folder")"""
_LOAD_IMAGE_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained({base!r}, num_labels={labels}, ignore_mismatched_sizes=True)
model = PeftModel.from_pretrained(model, "path/to/this/folder")"""
_LOAD_IMAGE_MODEL = """from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("path/to/this/folder")"""
_LOAD_BUILT = """from llm_fed import load_image_model

model = load_image_model("path/to/this/folder")  # logits (N, {labels}) = model(images), (N, 1 or 3, H, W) uint8"""
_LOAD_IMAGE_EXPERTS = """from llm_fed import load_client

client = load_client("path/to/this/folder", {base!r}, labels={labels})
print(client.classify(pixels))  # of images (N, 3, height, width) uint8 the labels' numbers (N,)"""
_LOAD_EXPERTS = """from llm_fed import load_client

print(load_client("path/to/this/folder", {base!r}).generate(["a prompt"]))"""


@dataclass(frozen=True)
class Kind:
    """What a personal model is, in a card's words."""

    words: str
    loads: str  # an example in Python
    library: str
    task: str  # the Hub's name of what it does
    on_hub: bool = True  # whether its base can be a Hub model


KINDS = {
    "adapter": Kind("A personal LoRA adapter", _LOAD, "peft", "text-generation"),
    "experts": Kind("Personal LoRA experts, a folder each, with their gate,", _LOAD_EXPERTS, "peft", "text-generation"),
    "image adapter": Kind("A personal LoRA adapter", _LOAD_IMAGE_ADAPTER, "peft", "image-classification"),
    "image experts": Kind(
        "Personal LoRA experts, a folder each, with their gate and head,",
        _LOAD_IMAGE_EXPERTS,
        "peft",
        "image-classification",
    ),
    "image model": Kind("A personal model", _LOAD_IMAGE_MODEL, "transformers", "image-classification"),
    "built image model": Kind("A personal model", _LOAD_BUILT, "llm_fed", "image-classification", on_hub=False),
    "image models": Kind(
        "Personal image models, which answer together,", _LOAD_BUILT, "llm_fed", "image-classification", on_hub=False
    ),
}


def model_card(
    *,
    base: str,
    client: str,
    method: str,
    paper: str,
    metrics: Mapping[str, float],
    config: str,
    recipe: Mapping[str, Any] | None = None,
    kind: str = "adapter",
    labels: int = 0,
    models: Sequence[str] = (),
    privacy: str = "",
) -> str:
    """The text of an adapter's README.md, with the front matter that the Hub reads, without a licence field.

    A card is made to be handed on, so a local file or folder stands in it by its last name alone.

    Args:
        base: the base's name; only one from the Hub is in the front matter.
        paper: how to cite the method.
        metrics: scores by name, 0-100.
        config: the run's resolved configuration, YAML.
        recipe: what a merge found out (`Method.recipe`).
        kind: a name in KINDS.
        labels: of an image model, how many it tells apart.
        models: names of those it consists of, where the base alone does not say it.
        privacy: a paragraph on what is guaranteed, if anything is.
    """
    shown = KINDS[kind]
    settings = _public(yaml.safe_load(config))
    task, shown_as = settings["task"], " and ".join(f"`{_public(name)}`" for name in models or (base,))
    dataset = task["path"] if "/" in (task["path"] or "") else task["name"]  # a Hub id, or the task's own name
    loads = f"path/to/{_public(base)}" if _is_local(base) else base
    data = ModelCardData(
        base_model=base if shown.on_hub and not _is_local(base) else None,
        library_name=shown.library,
        pipeline_tag=shown.task,
        tags=["llm_fed", *(["lora"] if shown.library == "peft" else []), "federated-learning"],
        model_name=f"{method}-{client}" if metrics else None,
        eval_results=[
            EvalResult(
                task_type=shown.task, dataset_type=dataset, dataset_name=f"{task['name']}, client {client}",
                dataset_split="test", metric_type=name, metric_value=round(value, 2),
            )
            for name, value in metrics.items()
        ]
        or None,
    )  # fmt: skip
    scores = "".join(f"| {name} | {value:.2f} |\n" for name, value in metrics.items())
    return f"""---
{data.to_yaml()}
---

# {"Adapter" if shown.library == "peft" else "Model"} of client {client}

{shown.words} of {shown_as}, \
trained by llm_fed with the method `{method}` ({paper}).

```python
{shown.loads.format(base=loads, labels=labels)}
```

## Scores of this client

| metric | score (0-100) |
|---|---|
{scores}{_privacy(privacy)}{_recipe(recipe)}
## Configuration of the run

```yaml
{yaml.safe_dump(settings, sort_keys=False).strip()}
```
"""


def _privacy(text: str) -> str:
    """A section of the card; nothing without a text."""
    return f"\n## Privacy\n\n{text}\n" if text else ""


def _recipe(recipe: Mapping[str, Any] | None) -> str:
    """A section of the card; nothing without a recipe."""
    if not recipe:
        return ""
    return (
        f"\n## Recipe of the merge\n\n```yaml\n{yaml.safe_dump(_public(dict(recipe)), sort_keys=False).strip()}\n```\n"
    )


def _public(value: Any) -> Any:
    """The value, where every path of this machine is cut to its last name."""
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    if isinstance(value, str) and _is_local(value):
        return os.path.basename(os.path.abspath(os.path.expanduser(value)))
    return value


def _is_local(name: str) -> bool:
    """Whether a name is a path, rather than a Hub id or any other word."""
    path = os.path.expanduser(name)
    return os.path.isabs(path) or name.startswith(("./", "../")) or os.path.exists(path)
