"""The model card of a personal adapter: what the Hub, and whoever is handed the folder, reads first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from llm_fed.basics import documents
from llm_fed.basics.documents import Json
from llm_fed.kinds import wording
from llm_fed.kinds.wording import Model
from llm_fed.settings import paths
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.settings.paths import is_local, public

_LOAD_SUBFOLDER = """
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(base, {repo!r}, subfolder={folder!r})
```
"""


def model_card(
    model: Model,
    *,
    client: str,
    method: str,
    paper: str,
    metrics: Mapping[str, float],
    config: str,
    recipe: Mapping[str, Json] | None = None,
    privacy: str = "",
    trust: str = "",
    unscored: str = "",
    warnings: Sequence[str] = (),
) -> str:
    """The text of an adapter's README.md, with the front matter that the Hub reads. A local file or folder stands in it
    by its last name alone, as it is made to be handed on.

    Args:
        paper: how to cite the method.
        metrics: scores by name, 0-100.
        config: the run's resolved configuration, YAML.
        recipe: what a merge found out (`Method.recipe`).
        privacy: a paragraph on what is guaranteed, if anything is.
        trust: a paragraph on what clients that lie could have done to it.
        unscored: why there are no `metrics`.
        warnings: sentences on what is wrong with it.
    """
    shown = model.wording
    settings, settings_text = _public_settings(config)
    task = settings["task"]
    dataset = paths.hub_id("task.path", task["path"] or "") or task["name"]
    objective = ObjectiveConfig(**settings.get("objective", {}))
    data = ModelCardData(
        base_model=model.base if shown.on_hub and not is_local(model.base) else None,
        library_name=shown.library,
        pipeline_tag=shown.task,
        tags=[
            "llm_fed", *(["lora"] if shown.library == "peft" else []), "federated-learning",
            *([objective.name] if objective.preferences else []),
        ],  # fmt: skip
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
    listed = "\n".join(f"- {sentence}" for sentence in warnings)
    scores = "".join(f"| {name} | {value:.2f} |\n" for name, value in metrics.items())
    table = f"| metric | score (at most 100) |\n|---|---|\n{scores}" if metrics or not unscored else f"{unscored}\n"
    return f"""---
{_front_matter(data)}
---

# {"Adapter" if shown.library == "peft" else "Model"} of client {client}

{shown.words} of {model.base_in_words}, \
trained by llm_fed with the method `{method}`{f" ({paper})" if paper else ""}\
{f" and the loss {loss}" if objective.preferences and (loss := objective.describe()) else ""}.

```python
{wording.example(model)}
```

## Scores of this client

{table}{_section("Warnings", listed)}{_section("Privacy", privacy)}{_section("Trust", trust)}{_recipe(recipe)}
## Configuration of the run

```yaml
{settings_text}
```
"""


def _front_matter(data: ModelCardData) -> str:
    """What `data.to_yaml()` returns, by libyaml, which is ten times as fast."""
    return documents.dump(data.to_dict(), unicode=True).strip()


@lru_cache(maxsize=1)
def _public_settings(config: str) -> tuple[Mapping[str, Any], str]:
    """A configuration as others may read it, and as YAML; the cards of a run's clients all have the same."""
    settings = public(documents.load(config))
    return settings, documents.dump(settings).strip()


def merge_card(base: str, recipe: Mapping[str, Json]) -> str:
    """The card of an adapter that was made of others; `base`: where it lies, or "" where that is not known."""
    data = ModelCardData(
        base_model=base if base and not is_local(base) else None, library_name="peft", tags=["llm_fed", "lora", "merge"]
    )
    return f"---\n{_front_matter(data)}\n---\n\n# Adapter merged by llm_fed\n{_recipe(recipe)}"


def repository_card(repository: str, card: ModelCard, folder: str, terms: Mapping[str, Any]) -> str:
    """The card of a repository with a folder for each client. `card`: of one of them. `folder`: that client's, if PEFT
    loads it from there as one adapter of a language model; else empty. `terms`: the licence fields."""
    known = card.data.to_dict()
    shared = {key: known[key] for key in ("base_model", "library_name", "pipeline_tag", "tags") if key in known}
    example = _LOAD_SUBFOLDER.format(base=known.get("base_model", "path/to/the/base"), repo=repository, folder=folder)
    return f"""---
{_front_matter(ModelCardData(**shared, **terms))}
---

# Personal models, a folder for each client

Trained by llm_fed, as a federation whose clients kept their data. Each folder has a README.md with its client's scores
and with the code that uses it.
{example if folder else ""}"""


def merged_card(card: str, model: Model) -> str:
    """The card of an adapter as that of the model into which it has been folded, with all else that it says."""
    adapter, shown = ModelCard(card), model.wording
    before, _, rest = adapter.text.partition("```python\n")
    _, _, after = rest.partition("\n```")
    before = before.replace("# Adapter of", "# Model of", 1).replace(wording.ADAPTER.words, shown.words, 1)
    adapter.text = f"{before}```python\n{wording.example(model)}\n```{after}"
    adapter.data["library_name"] = shown.library
    adapter.data["tags"] = [tag for tag in adapter.data.get("tags") or [] if tag != "lora"]
    return str(adapter)


def _section(title: str, text: str) -> str:
    """A section of the card; nothing without a text."""
    return f"\n## {title}\n\n{text}\n" if text else ""


def _recipe(recipe: Mapping[str, Json] | None) -> str:
    text = f"```yaml\n{documents.dump(public(dict(recipe))).strip()}\n```" if recipe else ""
    return _section("Recipe of the merge", text)
