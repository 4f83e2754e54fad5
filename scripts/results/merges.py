"""How far merged adapters are from what a merge means, by `llm-fed merge`, PEFT's `add_weighted_adapter` and mergekit.

pip install mergekit
python scripts/results/merges.py

Of each pair of random adapters on the tiny base the products s B A are merged densely, layer by layer; the table has
the norm of the difference over that of the exact merge, of all layers together. mergekit merges whole models: it gets
the base with each adapter merged in, and what it adds to the base's weights counts.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from torch import Tensor
from transformers import AutoModelForCausalLM

from llm_fed.commands.doctor import TINY_BASE
from llm_fed.commands.merge_folders import merge_folders
from llm_fed.mergers.ties import elected

QV = ["q_proj", "v_proj"]
PAIRS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank, one alpha": ({"r": 8, "lora_alpha": 16}, {"r": 8, "lora_alpha": 16}),
    "rsLoRA": ({"r": 8, "lora_alpha": 8, "use_rslora": True}, {"r": 8, "lora_alpha": 8, "use_rslora": True}),
    "unequal ranks and alphas": ({"r": 4, "lora_alpha": 16}, {"r": 8, "lora_alpha": 4}),
    "rank patterns": (
        {"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 2}},
        {"r": 8, "lora_alpha": 8, "rank_pattern": {"v_proj": 2}},
    ),
    "other layers": ({"r": 8, "lora_alpha": 8}, {"r": 8, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"]}),
}
MERGEKIT: Mapping[str, dict[str, Any]] = {
    "linear": {"merge_method": "linear", "parameters": {"weight": 0.5}},
    "ties at rank 16": {
        "merge_method": "ties", "base_model": str(TINY_BASE), "parameters": {"weight": 1.0, "density": 0.5},
    },
}  # fmt: skip
MERGES: Mapping[str, tuple[Callable[[Tensor], Tensor], dict[str, Any], dict[str, Any]]] = {
    "linear": (lambda both: both.mean(0), {}, {"combination_type": "linear"}),
    "linear, as cat": (lambda both: both.mean(0), {}, {"combination_type": "cat"}),
    "svd to rank 8": (lambda both: cut(both.mean(0), 8), {"rank": 8}, {"combination_type": "svd", "svd_rank": 8}),
    "ties at rank 16": (
        lambda both: elected(both, 0.5),
        {"density": 0.5, "rank": 16},
        {"combination_type": "ties_svd", "density": 0.5, "svd_rank": 16},
    ),
}


def cut(matrix: Tensor, rank: int) -> Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def added(model: Any, name: str) -> dict[str, Tensor]:
    """By layer what an adapter adds to the weights."""
    layers = {place: layer for place, layer in model.named_modules() if name in getattr(layer, "lora_A", {})}
    return {place: layer.get_delta_weight(name).detach().double() for place, layer in layers.items()}


def main() -> None:
    print("| adapters | merge | llm-fed merge | PEFT's add_weighted_adapter | mergekit |\n|---|---|---:|---:|---:|")
    for what, settings in PAIRS.items():
        for merge, (wanted, ours, theirs) in MERGES.items():
            print(f"| {what} | {merge} | {' | '.join(_errors(settings, merge, wanted, ours, theirs))} |")


def _errors(
    settings: tuple[dict[str, Any], dict[str, Any]],
    merge: str,
    wanted: Callable[[Tensor], Tensor],
    ours: dict[str, Any],
    theirs: dict[str, Any],
) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in "ab"]
        for seed, (folder, one) in enumerate(zip(folders, settings, strict=True)):
            torch.manual_seed(seed)
            made = peft.get_peft_model(base(), peft.LoraConfig(**{"target_modules": QV, **one}))
            for entry, parameter in made.named_parameters():
                if "lora_B" in entry:
                    torch.nn.init.normal_(parameter)
            made.save_pretrained(str(folder))
        model = peft.PeftModel.from_pretrained(base(), folders[0], adapter_name="a")
        model.load_adapter(folders[1], adapter_name="b")
        parents = [added(model, name) for name in "ab"]
        exact = {}
        for place in {**parents[0], **parents[1]}:
            known = next(parent[place] for parent in parents if place in parent)
            exact[place] = wanted(torch.stack([parent.get(place, torch.zeros_like(known)) for parent in parents]))
        merge_folders(folders, merge.split()[0].rstrip(","), Path(scratch) / "ours", settings=ours)
        model.load_adapter(Path(scratch) / "ours", adapter_name="ours")
        found = [_away(exact, added(model, "ours"))]
        try:
            weights = [1.0, 1.0] if merge.startswith("ties") else [0.5, 0.5]
            model.add_weighted_adapter(["a", "b"], weights, "theirs", **theirs)
            found.append(_away(exact, added(model, "theirs")))
        except Exception as error:
            found.append(f"refused ({type(error).__name__})")
        return [*found, _away(exact, _mergekit(folders, MERGEKIT[merge], exact)) if merge in MERGEKIT else "-"]


def _mergekit(folders: Sequence[Path], settings: Mapping[str, Any], layers: Iterable[str]) -> dict[str, Tensor]:
    """What mergekit's merge of whole models adds to the base, by layer."""
    whole = [folder.with_name(f"{folder.name}-whole") for folder in folders]
    for folder, path in zip(folders, whole, strict=True):
        peft.PeftModel.from_pretrained(base(), folder).merge_and_unload().save_pretrained(path)
    config = {**settings, "models": [{"model": str(path)} for path in whole], "dtype": "float32"}
    out = folders[0].with_name("mergekit")
    run_merge(MergeConfiguration.model_validate(config), str(out), MergeOptions(copy_tokenizer=False))
    merged, before = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), base()
    names = {place: f"{place.removeprefix('base_model.model.')}.weight" for place in layers}
    after, start = merged.state_dict(), before.state_dict()
    return {place: (after[name].double() - start[name].double()) for place, name in names.items()}


def _away(exact: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    away = math.hypot(*(float((exact[place] - found.get(place, 0 * exact[place])).norm()) for place in exact))
    return f"{away / math.hypot(*(float(value.norm()) for value in exact.values())):.1g}"


def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32)


if __name__ == "__main__":
    main()
