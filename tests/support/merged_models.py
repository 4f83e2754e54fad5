"""Families of causal language models, tiny, with an adapter folded in by `export --merged`, and read by others.

Each is exported, which compares it with base and adapter, and then read by older libraries (`reader.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import every_family
import torch
from reader import read_by
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.rng import generator
from llm_fed.export import merged, model_files, older
from llm_fed.export.card import model_card
from llm_fed.export.models import write
from llm_fed.kinds.language import load_base
from llm_fed.kinds.wording import Model
from llm_fed.models.lora import Lora, targets
from llm_fed.models.prompt import Prompt
from llm_fed.settings.config import BaseConfig
from llm_fed.state import State
from llm_fed.tasks.common import Template
from llm_fed.testing.tiny import SPECIAL, VOCABULARY, tokenizer

IDS = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))
NEAR = 2e-4  # the largest distance of logits, relative to their length
ROUNDED = {"apertus": 0.02}  # version 4 computes its activation in bfloat16, so that greedy answers differ, too


@dataclass
class Outcome:
    """What became of one model: `flaw` is empty if it is the one that was scored, wherever it was read."""

    name: str
    folder: Path
    flaw: str = ""
    needs: str = ""  # the version of transformers that the export names
    refused: str = ""  # why its family cannot be a base


def variants(family: str) -> dict[str, dict[str, Any]]:
    """By name changes of a family's configuration: its head tied to its embedding, and forms of rotary embeddings, of
    families for which an export translates them."""
    found = {family: {}, f"{family}-tied": {"tie_word_embeddings": True}}
    forms = every_family.variants(family) if family in older.FAMILIES else {}
    return found | {
        f"{family}-{name}": changes
        for name, changes in forms.items()
        if "rope_parameters" in changes and name != "dynamic"  # whose frequencies depend on the text
    }


def export(name: str, family: str, changes: dict[str, Any], work: Path) -> Outcome:
    """Fold a random adapter into a model and export it, which compares it; and note what it computes.

    Raises:
        Exception: of any kind, where no such model can be made.
    """
    model = every_family.noisy(family, **changes)
    with torch.no_grad():
        model(input_ids=IDS)
    place = work / name
    model.save_pretrained(place / "base")
    tokenizer(**SPECIAL).save_pretrained(place / "base")
    config, outcome = BaseConfig(name=str(place / "base"), dtype="float32"), Outcome(name, place / "out/ada")
    try:
        base = load_base(config, "cpu")
        structure = Lora(3, 6.0, 0.0, adapted(base.model, head="tied" in name))
        state = base.draw(structure, generator(1, name))
        state = State(state.layout, 0.3 * torch.randn(state.row.shape, generator=generator(2, name)))
        prompt = Prompt(Template("plain", "{prompt}"), (1,), 8)
        card = model_card(Model("base", prompt=prompt), client="ada", method="local", paper="", metrics={},
                          config="task: {name: files, path: null}")  # fmt: skip
        write(place / "ada", state, structure, base, card, prompt)
        list(merged.ExportPlan(config, {"ada": place / "ada"}, place / "out").write())
        outcome.needs = older.advice(model_files.settings_read(config)).partition("to load it takes ")[2]
    except (UserError, RunError) as error:
        if "which cannot be a base: " in str(error):
            outcome.refused = str(error)
        else:
            outcome.flaw = str(error)
        return outcome
    whole = AutoModelForCausalLM.from_pretrained(outcome.folder).eval()
    start = IDS[:1, :9]
    with torch.no_grad():
        output = whole.generate(input_ids=start, attention_mask=torch.ones_like(start), max_new_tokens=8)
        logits = whole(input_ids=IDS).logits.float().contiguous()
    found = {"ids": IDS, "logits": logits, "prompt": start[0].clone(), "answer": output[0, 9:].clone()}
    save_file(found, place / "expected.safetensors")
    return outcome


def adapted(model: PreTrainedModel, head: bool) -> tuple[str, ...]:
    """The last names of up to four kinds of linear layers that can have adapters, and of the head if it is wanted."""
    output = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not output
        and "vision" not in name
        and "Grouped" not in type(module).__name__  # they multiply in blocks, which no adapter does
    ]
    found = [each for each in dict.fromkeys(name.rpartition(".")[2] for name in names) if can_be_adapted(model, each)]
    found = found[:4]
    if head or not found:
        found.append(next(name for name, module in model.named_modules() if module is output))
    return tuple(found)


def can_be_adapted(model: PreTrainedModel, name: str) -> bool:
    """Whether layers of this last name may have adapters; those of a mixture of experts, for example, may not."""
    try:
        return bool(targets(model, Lora(3, 6.0, 0.0, (name,))))
    except UserError:
        return False


def read_elsewhere(outcomes: list[Outcome], libraries: Path, work: Path) -> None:
    """Let older libraries read the models, and note where they read others."""
    items = [{"folder": str(each.folder), "expected": str(each.folder.parents[1] / "expected.safetensors"),
              "text": "w5 w6 w7"} for each in outcomes]  # fmt: skip
    for each, said in zip(outcomes, read_by(libraries, items, work), strict=True):
        near = ROUNDED.get(each.name.partition("-")[0], NEAR)
        alike = said.get("tokens") == [5, 6, 7] and said["apart"] < near and (said["answer"] or near > NEAR)
        if not alike:
            each.flaw = f"transformers 4.57: {said}"
