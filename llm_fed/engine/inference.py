"""What the frozen base computes without training: losses of several adapters, hidden states of prompts, mixing weights.

Shape letters: E experts, H hidden size, N rows, R prompts or pictures, S stored ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.examples import TEXT, Item, inputs_of
from llm_fed.engine.memory import budget_and_overhead
from llm_fed.engine.packing import plan
from llm_fed.models.base import Base
from llm_fed.models.lora import ANCHORS, SCALE
from llm_fed.state import State
from llm_fed.tasks.common import Encoded


def _target_losses(
    model: AdaptedModel,
    bank: AdapterBank | None,
    work: Sequence[tuple[int, Item]],
    mix: Tensor | None,
    losses: Callable[..., Tensor],
) -> tuple[Tensor, Tensor]:
    """The losses (n,) of all targets of examples, each under a row of the bank, and the index (n,) of each one's
    example, on the CPU. Examples of equal length share a micro-batch, whoever asks. Losses are read at the end, so that
    a GPU need not wait for the host between micro-batches."""
    of, found, owners = model.examples, [torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)]
    for chosen in plan([of.length(example) for _, example in work], *model.limits):
        batch, index = of.collate([work[i][1] for i in chosen]), torch.tensor([work[i][0] for i in chosen])
        weights = None if mix is None else of.by_row(mix[chosen])
        within = nullcontext() if bank is None else bank.attached(of.by_row(index), mix=weights)
        with within, model.computing():
            found.append(losses(model.model, batch, all_rows=bank is not None and bank.adapts_head))
        owners.append(torch.tensor(chosen)[batch.rows])
    return torch.cat(found[1:] or found).cpu(), torch.cat(owners)


@torch.inference_mode()
def mean_losses(
    model: AdaptedModel,
    bank: AdapterBank,
    requested: Sequence[tuple[int, Sequence[Item]]],
    *,
    mix: Tensor | None = None,
) -> list[float]:
    """The mean loss per target of each list of examples under one row of the bank; NaN without a target. `requested`:
    (row of the bank, examples). `mix`: (examples of all lists, E), where the gate of the bank's structure is `mix`."""
    work = [(row, example) for row, examples in requested for example in examples]
    lists = torch.tensor([n for n, (_, examples) in enumerate(requested) for _ in examples], dtype=torch.int64)
    losses, owners = _target_losses(model, bank, work, mix, model.examples.losses)
    total = torch.zeros(len(requested), dtype=torch.float64).index_add_(0, lists[owners], losses.double())
    return (total / lists[owners].bincount(minlength=len(requested))).tolist()


@torch.inference_mode()
def log_likelihoods(
    model: AdaptedModel,
    bank: AdapterBank | None,
    texts: Sequence[Encoded],
    *,
    mix: Tensor | None = None,
    rows: Sequence[int] | None = None,
) -> list[float]:
    """Of each text the log-likelihood of all its tokens that count, together.

    Args:
        bank: None: the base alone.
        mix: (N, E) the weights of two experts for each text, where the gate is `mix`.
        rows: the row of the bank of each text (default: the first).
    """
    work = list(zip(rows or [0] * len(texts), texts, strict=True))
    losses, owners = _target_losses(replace(model, examples=TEXT), bank, work, mix, TEXT.token_losses)
    return torch.zeros(len(texts), dtype=losses.dtype).index_add_(0, owners, -losses).tolist()


@torch.inference_mode()
def features(base: Base, prompts: Sequence[Sequence[int]]) -> Tensor:
    """h (R, H): the base's last hidden state at each prompt's last token, at least float32, on the CPU."""
    lengths = [len(prompt) for prompt in prompts]
    found = torch.zeros(len(prompts), base.model.config.get_text_config().hidden_size)
    body = base.model.base_model
    if body is base.model:  # of some families it is the whole model
        body = dict(base.model.named_children()).get("model", body)
    for chosen in plan(lengths, *budget_and_overhead(base.model.device)):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompts[i]) for i in chosen], batch_first=True)
        with base.computing():  # padding on the right reaches no real token
            sizes = torch.tensor([lengths[i] for i in chosen])
            output = body(**inputs_of(base.model, ids, sizes), use_cache=False)
        hidden = output.last_hidden_state.cpu()[torch.arange(len(chosen)), sizes - 1]
        found = found.to(torch.promote_types(found.dtype, hidden.dtype))
        found[torch.tensor(chosen)] = hidden.to(found.dtype)
    return found


def similarity_weights(found: Tensor, states: Sequence[State]) -> Tensor:
    """Weights (R, 2) of two experts for each prompt or picture: 1 - alpha(x) and alpha(x).

    alpha(x) is the mean cosine of h(x) with the state's stored anchors, times its scale, clipped to [0, 1] (Yang et al.
    2024, instance-wise dynamic weighting). `found`: h (R, H), the base's features of each. `states`: of each, with the
    extras ANCHORS (S, H) and SCALE.
    """
    weights = torch.zeros(len(states), 2, dtype=found.dtype)
    for row, state in enumerate(states):
        anchors = state.extras[ANCHORS].to(found)
        cosine = torch.nn.functional.cosine_similarity(found[row], anchors, dim=-1)
        alpha = (state.extras[SCALE].to(found) * cosine.mean()).clamp(0, 1)
        weights[row] = torch.stack([1 - alpha, alpha])
    return weights
