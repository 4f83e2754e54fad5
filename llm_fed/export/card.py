"""The model card of a personal adapter: what the Hub, and whoever is handed the folder, reads first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from llm_fed.models.prompt import Prompt
from llm_fed.settings import datapath
from llm_fed.settings.paths import is_local, public

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the first one where yaml was built with libyaml
_LOAD = """import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, {classes}

base, folder = {base!r}, "path/to/this/folder"
prompt = "a prompt"

tokenizer = AutoTokenizer.from_pretrained(base{revision})
model = AutoModelForCausalLM.from_pretrained(base{revision}, dtype={dtype!r}{quantized})
model.generation_config = GenerationConfig(
    do_sample=False, max_new_tokens={most}, eos_token_id={stop}, pad_token_id={pad}
)
model = PeftModel.from_pretrained(model, folder).eval()

{encode}
inputs = torch.tensor([ids], device=model.device)
output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs))[0, len(ids):].tolist()
answer = [token for token in output if token not in {stop}]
print(tokenizer.decode(answer, skip_special_tokens=True).strip())"""
# Of a model with the adapter folded in: all is in one folder, and nothing is PEFT's.
_LOAD_MERGED = (
    _LOAD.replace("from peft import PeftModel\n", "")
    .replace("base, folder = {base!r}, ", "folder = ")
    .replace("from_pretrained(base{revision}", "from_pretrained(folder")
    .replace("{quantized}", "")
    .replace("model = PeftModel.from_pretrained(model, folder).eval()\n", "")
)
_LOAD_SUBFOLDER = """
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(base, {repo!r}, subfolder={folder!r})
```
"""
_ENCODE = """text = {text!r}.replace("{{prompt}}", prompt)
ids = tokenizer(text)["input_ids"]
if ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text with it
    ids = ids[:-1]"""
_ENCODE_CHAT = """with open(folder + "/prompt.json", encoding="utf-8") as file:
    chat = json.load(file)
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt}], chat_template=chat["chat_template"], add_generation_prompt=True,
    return_dict=False, date_string=chat["date_string"],
)"""
_QUANTIZED = {  # as `models.loading` does it
    "nf4": "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, "
    "bnb_4bit_compute_dtype={dtype!r})",
    "int8": "BitsAndBytesConfig(load_in_8bit=True)",
}
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

client = load_client("path/to/this/folder", {base!r}, dtype={dtype!r})
print(client.generate(["a prompt"])[0])"""


@dataclass(frozen=True)
class Wording:
    """What a personal model is, in a card's words."""

    words: str
    loads: str  # an example in Python
    library: str
    task: str  # the Hub's name of what it does
    on_hub: bool = True  # whether its base can be a Hub model


WORDINGS = {
    "adapter": Wording("A personal LoRA adapter", _LOAD, "peft", "text-generation"),
    "experts": Wording(
        "Personal LoRA experts, a folder each, with their gate,", _LOAD_EXPERTS, "peft", "text-generation"
    ),
    "merged": Wording(
        "A personal model, with a LoRA adapter folded into the weights,",
        _LOAD_MERGED,
        "transformers",
        "text-generation",
    ),
    "image adapter": Wording("A personal LoRA adapter", _LOAD_IMAGE_ADAPTER, "peft", "image-classification"),
    "image experts": Wording(
        "Personal LoRA experts, a folder each, with their gate and head,",
        _LOAD_IMAGE_EXPERTS,
        "peft",
        "image-classification",
    ),
    "image model": Wording("A personal model", _LOAD_IMAGE_MODEL, "transformers", "image-classification"),
    "built image model": Wording("A personal model", _LOAD_BUILT, "llm_fed", "image-classification", on_hub=False),
    "image models": Wording(
        "Personal image models, which answer together,", _LOAD_BUILT, "llm_fed", "image-classification", on_hub=False
    ),
}


@dataclass(frozen=True)
class Model:
    """What a card says of the model itself."""

    base: str  # the base's name; only one from the Hub is in the front matter
    kind: str = "adapter"  # a name in WORDINGS
    labels: int = 0  # of an image model, how many it tells apart
    parts: Sequence[str] = ()  # names of those it consists of, where the base alone does not say it
    prompt: Prompt | None = None  # of a language model, how it is put, and where an answer ends, if that is known
    dtype: str = "float32"  # of the base in the example
    revision: str | None = None  # of the base on the Hub
    quantization: str | None = None  # of the base

    @property
    def base_in_words(self) -> str:
        """The base, or what else the model consists of, and how it was loaded."""
        names = " and ".join(f"`{public(name)}`" for name in self.parts or (self.base,))
        if "image" in self.kind:
            return names
        at = f"revision `{self.revision}`" if self.revision else None
        return f"{names} ({', '.join(filter(None, (at, self.dtype, self.quantization)))})"


def model_card(
    model: Model,
    *,
    client: str,
    method: str,
    paper: str,
    metrics: Mapping[str, float],
    config: str,
    recipe: Mapping[str, Any] | None = None,
    privacy: str = "",
    unscored: str = "",
) -> str:
    """The text of an adapter's README.md, with the front matter that the Hub reads, without a licence field.

    A card is made to be handed on, so a local file or folder stands in it by its last name alone.

    Args:
        paper: how to cite the method.
        metrics: scores by name, 0-100.
        config: the run's resolved configuration, YAML.
        recipe: what a merge found out (`Method.recipe`).
        privacy: a paragraph on what is guaranteed, if anything is.
        unscored: why there are no `metrics`.
    """
    shown = WORDINGS[model.kind]
    settings, settings_text = _public_settings(config)
    task = settings["task"]
    hub = datapath.hub_id("task.path", task["path"] or "")
    dataset = hub or task["name"]
    data = ModelCardData(
        base_model=model.base if shown.on_hub and not is_local(model.base) else None,
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
    table = f"| metric | score (0-100) |\n|---|---|\n{scores}" if metrics or not unscored else f"{unscored}\n"
    return f"""---
{_front_matter(data)}
---

# {"Adapter" if shown.library == "peft" else "Model"} of client {client}

{shown.words} of {model.base_in_words}, \
trained by llm_fed with the method `{method}`{f" ({paper})" if paper else ""}.

```python
{_example(model)}
```

## Scores of this client

{table}{_privacy(privacy)}{_recipe(recipe)}
## Configuration of the run

```yaml
{settings_text}
```
"""


def _front_matter(data: ModelCardData) -> str:
    """What `data.to_yaml()` returns, by libyaml, which is ten times as fast."""
    return str(yaml.dump(data.to_dict(), Dumper=_DUMPER, allow_unicode=True, sort_keys=False)).strip()


@lru_cache(maxsize=1)
def _public_settings(config: str) -> tuple[Mapping[str, Any], str]:
    """A configuration as others may read it, and as YAML; the cards of a run's clients all have the same."""
    settings = public(yaml.safe_load(config))
    return settings, yaml.safe_dump(settings, sort_keys=False).strip()


def repository_card(repository: str, card: ModelCard, folder: str, terms: Mapping[str, Any]) -> str:
    """The card of a repository with a folder for each client.

    Args:
        card: of one of the clients.
        folder: that client's, if it is one adapter of a language model, which PEFT loads from there; else empty.
        terms: the licence fields.
    """
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
    """The card of an adapter as that of the model into which it has been folded, with all else that it says.

    Args:
        model: the kind is `merged`.
    """
    adapter, shown = ModelCard(card), WORDINGS[model.kind]
    data: Any = adapter.data
    before, _, rest = adapter.text.partition("```python\n")
    _, _, after = rest.partition("\n```")
    before = before.replace("# Adapter of", "# Model of", 1).replace(WORDINGS["adapter"].words, shown.words, 1)
    adapter.text = f"{before}```python\n{_example(model)}\n```{after}"
    data.library_name = shown.library
    data.tags = [tag for tag in data.tags or [] if tag != "lora"]
    return str(adapter)


def _example(model: Model) -> str:
    """A few lines of Python that use the model, with stock transformers and PEFT where these know it."""
    shown, prompt, dtype = WORDINGS[model.kind], model.prompt, model.dtype
    base = f"path/to/{public(model.base)}" if is_local(model.base) else model.base
    of_text = shown.loads in (_LOAD, _LOAD_MERGED)
    if shown.loads == _LOAD and prompt is None:  # a merge of adapters that do not say how they were trained
        return _LOAD_EXPERTS.format(base=base, dtype=dtype)
    if prompt is None or not of_text:
        return shown.loads.format(base=base, labels=model.labels, dtype=dtype)
    chat = prompt.template.date is not None
    kind, revision = model.quantization, model.revision
    text = shown.loads.format(
        base=base, dtype=dtype, most=prompt.max_new_tokens, stop=list(prompt.stop), pad=prompt.stop[0],
        encode=_ENCODE_CHAT if chat else _ENCODE.format(text=prompt.template.text),
        revision=f", revision={revision!r}" if revision else "",
        quantized=f", quantization_config={_QUANTIZED[kind].format(dtype=dtype)}" if kind else "",
        classes="BitsAndBytesConfig, GenerationConfig" if kind else "GenerationConfig",
    )  # fmt: skip
    return f"import json\n\n{text}" if chat else text


def _privacy(text: str) -> str:
    """A section of the card; nothing without a text."""
    return f"\n## Privacy\n\n{text}\n" if text else ""


def _recipe(recipe: Mapping[str, Any] | None) -> str:
    """A section of the card; nothing without a recipe."""
    if not recipe:
        return ""
    return (
        f"\n## Recipe of the merge\n\n```yaml\n{yaml.safe_dump(public(dict(recipe)), sort_keys=False).strip()}\n```\n"
    )
