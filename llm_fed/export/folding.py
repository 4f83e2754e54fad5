"""Folds an adapter into the weights of its base: W becomes W + s B A, with DoRA m (W + s B A) / ||W + s B A||."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llm_fed.basics.errors import UserError
from llm_fed.models.fused_experts import fused_parameters
from llm_fed.models.lora import Lora, targets
from llm_fed.state import State, magnitude, pair


def untied(model: PreTrainedModel, structure: Lora, adapter: Path) -> bool:
    """Whether an adapter changes a head that is the model's embedding as well, so that folding must part the two.
    UserError: it changes another weight that several layers share. Transformers would make these equal again."""
    owners = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[id(parameter)].append((name, key, module))
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    parted = False
    for name, layer in targets(model, structure).items():
        sharing = owners[id(layer.weight)]
        if len(sharing) == 1:
            continue
        if not {id(module) for _, _, module in sharing} <= ends:
            others = ", ".join(f"{other}.{key}" for other, key, module in sharing if module is not layer)
            raise UserError(
                f"{adapter} adapts {name}, whose weights are those of {others} in a {type(model).__name__}: a model "
                "with the adapter folded in cannot be saved; leave out --merged"
            )
        parted = True
    return parted


@torch.no_grad()
def fold(model: PreTrainedModel, structure: Lora, state: State, adapter: Path) -> None:
    """Change the weights of a model, in their dtype, as a plain adapter does; a head that was tied has its own then.
    UserError: a weight becomes too large for its dtype."""
    parted = untied(model, structure, adapter)
    for name, layer in targets(model, structure).items():
        first, second = pair(name, "")
        weight = cast(Tensor, layer.weight)
        exact = torch.promote_types(weight.dtype, state.row.dtype)
        update = structure.scaling * (state[second].to(exact) @ state[first].to(exact))
        turned = isinstance(layer, Conv1D)
        whole = weight.to(exact) + (update.T if turned else update)
        if structure.dora:
            lengths = state[magnitude(name)].to(exact) / torch.linalg.vector_norm(whole, dim=0 if turned else 1)
            whole = whole * (lengths if turned else lengths[:, None])
        layer.weight = nn.Parameter(_finite(whole, weight.dtype, name, adapter), requires_grad=False)
    for name, fused in fused_parameters(model, structure.parameters).items():
        of = [pair(f"{name}.{expert}", "") for expert in range(fused.experts)]
        weight = fused.weight
        exact = torch.promote_types(weight.dtype, state.row.dtype)
        update = structure.scaling * torch.stack([state[b].to(exact) @ state[a].to(exact) for a, b in of])
        whole = weight.to(exact) + (update.mT if fused.block.is_transposed else update)
        setattr(fused.block, fused.name, nn.Parameter(_finite(whole, weight.dtype, name, adapter), requires_grad=False))
    if parted:
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
        # Transformers saves names as it has read them, and it has read none of the head: let it look them up.
        model._weight_conversions = None  # type: ignore[assignment]


def _finite(weights: Tensor, dtype: torch.dtype, name: str, adapter: Path) -> Tensor:
    changed = weights.to(dtype)
    if not changed.isfinite().all():
        raise UserError(f"the adapter {adapter} cannot be merged into {dtype} weights: {name} becomes infinite or NaN")
    return changed
