"""Random adapters of stock PEFT, read here, written here and read by stock PEFT, and folded into their bases.

Logits must be equal, or the adapter is refused by the name of a feature that it has.
"""

import copy
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import every_family
import peft
import tiny_base
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdapterBank
from llm_fed.export import peft_folders
from llm_fed.export.folding import fold
from llm_fed.models.base import Base
from llm_fed.models.lora import Lora
from llm_fed.state import State
from llm_fed.testing.tiny import VOCABULARY

IDS = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))
NEAR = 2e-4  # the largest distance of logits, relative to their length
BASES = ("llama", "qwen3", "gpt2", "gemma2", "phi3", "gpt_neox", "mixtral", "opt", "qwen2")
NAMES = {  # of modules in which adapters usually are
    "gpt2": ("c_attn", "c_proj", "c_fc"), "phi3": ("qkv_proj", "o_proj", "gate_up_proj"), "opt": ("q_proj", "fc1"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h"), "mixtral": ("q_proj", "v_proj", "o_proj"),
}  # fmt: skip
# Settings that an adapter may have and that are refused here, by the name that the message must give.
REFUSED: dict[str, dict[str, Any]] = {
    "bias": {"bias": "lora_only"}, "modules_to_save": {"modules_to_save": ["embed"]},
    "rank_pattern": {"rank_pattern": {"0.*": 3}}, "alpha_pattern": {"alpha_pattern": {"0.*": 3}},
    "init_lora_weights": {"init_lora_weights": "pissa"}, "trainable_token_indices": {"trainable_token_indices": [3]},
}  # fmt: skip


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def apart(one: Tensor, other: Tensor) -> float:
    """The largest distance of two rows of logits, relative to their length; what is added to all does not count."""
    one, other = (rows - rows.mean(-1, keepdim=True) for rows in (one, other))
    return ((one - other).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-6)).max().item()


class Adapters:
    """Random adapters of stock PEFT."""

    def __init__(self, work: Path):
        self._work = work
        self._models: dict[tuple[str, bool], PreTrainedModel] = {}
        self.written: list[dict[str, str]] = []  # what `reader.py` can read

    def base(self, draw: random.Random) -> Base:
        family, tied = draw.choice(BASES), draw.random() < 0.5
        if (family, tied) not in self._models:
            self._models[family, tied] = every_family.noisy(family, tie_word_embeddings=tied)
        return tiny_base.around(copy.deepcopy(self._models[family, tied]))

    def settings(self, base: Base, draw: random.Random) -> tuple[dict[str, Any], str]:
        """A LoRA configuration, and the name of the feature for which it must be refused, if any."""
        model: Any = base.model
        family = model.config.model_type
        usual = NAMES.get(family, ("q_proj", "v_proj", "o_proj", "up_proj"))
        linear = [name for name, module in model.named_modules() if peft_linear(module) and ".experts" not in name]
        some = sorted(draw.sample(usual, draw.randint(1, len(usual))))
        head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), "")
        mixture = family == "mixtral"
        targets = draw.choice([
            some, [*some, head], f"{head.split('.')[-1]}|.*({'|'.join(some)})", rf".*\.[01]\..*({some[0]})",
            some if mixture else "all-linear", draw.sample(linear, min(3, len(linear))),
        ])  # fmt: skip
        found: dict[str, Any] = {
            "r": draw.choice((1, 2, 5, 8)), "lora_alpha": draw.choice((1, 4, 16, 3.5)), "target_modules": targets,
            "use_rslora": draw.random() < 0.3, "lora_dropout": draw.choice((0.0, 0.1)),
            "task_type": draw.choice(("CAUSAL_LM", None)), "init_lora_weights": draw.choice((True, "gaussian", False)),
        }  # fmt: skip
        if draw.random() < 0.25:
            found["exclude_modules"] = draw.choice([[some[0]], r".*\.1\..*", [linear[0]]])
        if draw.random() < 0.25 and isinstance(targets, list):
            found["layers_to_transform"] = draw.choice(([0], [1], 1, [0, 1]))
            if draw.random() < 0.5:
                found["layers_pattern"] = draw.choice(("layers", ["h", "layers"]))
        if draw.random() < 0.2:
            found["rank_pattern"] = {".*": 3}
            found["alpha_pattern"] = {rf".*{name.rpartition('.')[2]}": 7 for name in linear}
        feature = draw.choice(list(REFUSED)) if draw.random() < 0.15 else ""
        return found | (_refused(feature, model, some) if feature else {}), feature

    def try_one(self, draw: random.Random) -> str:
        """What became of one case: how it was read, or why it cannot be made.

        Raises:
            AssertionError: it was read as another model, or refused for a reason that is not its own.
        """
        base = self.base(draw)
        settings, feature = self.settings(base, draw)
        folder = self._work / "stock"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            wrapped = peft.get_peft_model(copy.deepcopy(base.model), peft.LoraConfig(**settings))
            _fill(wrapped)
            wrapped.eval().save_pretrained(folder)
        except (ValueError, TypeError, RuntimeError, KeyError, NotImplementedError, IndexError):
            return "not made"
        _spelled(folder, draw)
        expected = logits(wrapped)
        try:
            state, structure = peft_folders.read(folder, base)
            distances = {"read": apart(expected, _under_bank(base, structure, state))}
        except UserError as error:
            said = str(error)
            flat = base.model.config.model_type == "opt" and "as it reads all tokens of" in said
            assert flat or (feature and feature in said), f"{settings}: {said}"
            return "refused"
        assert not feature, f"{settings} was taken"
        peft_folders.write(self._work / "ours", state, structure, base, "")
        with warnings.catch_warnings():  # PEFT warns of keys that are missing or that it does not know
            warnings.filterwarnings("error", "Found missing|Unexpected keyword")
            again = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), self._work / "ours")
        distances["written"] = apart(expected, logits(again.eval()))
        if not (base.model.config.model_type == "gpt_neox" and any(".lm_head." in f".{name}" for name in state)):
            self._keep(base, expected, settings)  # version 4 calls that head embed_out, and lets its adapter lie
        fold(base.model, structure, state, folder)  # type: ignore[arg-type]
        distances["folded"] = apart(expected, logits(base.model))
        assert max(distances.values()) < NEAR, f"{settings}: {distances}"
        return "equal"

    def _keep(self, base: Base, expected: Tensor, settings: dict[str, Any]) -> None:
        """Leave the adapter that was written, with its base and its logits, for others."""
        number = len(self.written)
        place = self._work / f"kept-{number}"
        base.model.save_pretrained(place / "base")
        shutil.move(self._work / "ours", place / "ours")
        save_file({"ids": IDS, "logits": expected.contiguous()}, place / "expected.safetensors")
        self.written.append({"folder": str(place / "base"), "adapter": str(place / "ours"),
                             "expected": str(place / "expected.safetensors"),
                             "what": f"{base.model.config.model_type}, {settings}"})  # fmt: skip


def peft_linear(module: Any) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D")


def _refused(feature: str, model: Any, some: list[str]) -> dict[str, Any]:
    if feature == "modules_to_save":
        embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
        return {"modules_to_save": [embedding.rpartition(".")[2]]}
    if feature.endswith("_pattern"):
        return {feature: {rf".*\.0\..*{some[0]}": 3}, "target_modules": some, "exclude_modules": None,
                "layers_to_transform": None, "layers_pattern": None}  # fmt: skip
    return REFUSED[feature]


def _fill(wrapped: Any) -> None:
    """Make an adapter's factors random, so that it changes what the model computes."""
    draws = generator(2, "stock")
    for name, parameter in wrapped.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=draws)


def _spelled(folder: Path, draw: random.Random) -> None:
    """Write an adapter's settings as another version of PEFT might: without those at their default, with others that
    are off."""
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text())
    usual = json.loads(json.dumps(peft.LoraConfig().to_dict(), default=list))
    if draw.random() < 0.5:
        values = {key: value for key, value in values.items() if key == "peft_type" or value != usual.get(key, "none")}
    if draw.random() < 0.5:
        values |= {"use_invented": False, "invented_config": None, "enable_lora": None, "merge_weights": False}
    path.write_text(json.dumps(values))


def _under_bank(base: Base, structure: Lora, state: State) -> Tensor:
    bank = AdapterBank(base.model, structure, 1)
    bank.load(0, state)
    with bank.attached(torch.tensor([0, 0])):
        return logits(base.model)
