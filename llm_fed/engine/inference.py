"""What the frozen base computes without training: losses of several adapters, hidden states of prompts, mixing weights.

Shape letters: E experts, H hidden size, N rows, R prompts or pictures, S stored ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import TEXT, inputs_of
from llm_fed.engine.memory import budget_and_overhead
from llm_fed.engine.packing import collate, plan
from llm_fed.models.base import Base
from llm_fed.models.lora import ANCHORS, SCALE
from llm_fed.state import State
from llm_fed.tasks.common import Encoded


@torch.inference_mode()
def mean_losses(
    model: AdaptedModel,
    bank: AdapterBank,
    requested: Sequence[tuple[int, Sequence[Any]]],
    *,
    mix: Tensor | None = None,
) -> list[float]:
    """The mean loss per target of each list of examples under one row of the bank; NaN without a target.

    Args:
        asked: (row of the bank, examples); examples of equal length share a micro-batch, whoever asks.
        mix: (examples of all lists, E), where the gate of the bank's structure is `mix`.
    """
    work = [(n, row, example) for n, (row, examples) in enumerate(requested) for example in examples]
    found, owners = [], []
    lengths = [model.examples.length(example) for _, _, example in work]
    for chosen in plan(lengths, model.most_tokens, model.overhead):
        batch, of = model.examples.collate([work[i][2] for i in chosen]), model.examples
        index, weights = torch.tensor([work[i][1] for i in chosen]), None if mix is None else of.by_row(mix[chosen])
        with bank.attached(of.by_row(index), mix=weights), model.computing():
            found.append(of.losses(model.model, batch, all_rows=bank.adapts_head))
        owners.append(torch.tensor([work[i][0] for i in chosen])[batch.rows])
    total = torch.zeros(len(requested), dtype=torch.float64)
    count = torch.zeros(len(requested), dtype=torch.float64)
    if found:  # read at the end, so that a GPU need not wait for the host between micro-batches
        losses = torch.cat(found).cpu().double()
        for owner, its in zip(owners, losses.split([len(each) for each in owners]), strict=True):
            total.index_add_(0, owner, its)
            count.index_add_(0, owner, torch.ones_like(its))
    return (total / count).tolist()


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
    found = [0.0] * len(texts)
    for chosen in plan([len(text.input_ids) for text in texts], model.most_tokens, model.overhead):
        batch, index = collate([texts[i] for i in chosen]), torch.tensor([rows[i] if rows else 0 for i in chosen])
        weights = None if mix is None else mix[chosen]
        with nullcontext() if bank is None else bank.attached(index, mix=weights), model.computing():
            losses = TEXT.token_losses(model.model, batch, all_rows=bank is not None and bank.adapts_head)
        sums = torch.zeros(len(chosen), dtype=losses.dtype, device=losses.device)
        sums.index_add_(0, batch.rows.to(losses.device), losses)
        for position, value in zip(chosen, (-sums).tolist(), strict=True):
            found[position] = value
    return found


@torch.inference_mode()
def features(base: Base, prompts: Sequence[Sequence[int]]) -> Tensor:
    """h (R, H): the base's last hidden state at each prompt's last token, at least float32, on the CPU."""
    lengths = [len(prompt) for prompt in prompts]
    found = torch.zeros(len(prompts), base.model.config.get_text_config().hidden_size)
    body = base.model.base_model
    if body is base.model:  # of some families it is the whole model
        body = getattr(base.model, "model", body)
    for chosen in plan(lengths, *budget_and_overhead(base.model.device)):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompts[i]) for i in chosen], batch_first=True)
        with base.computing():  # padding on the right reaches no real token
            inputs = inputs_of(base.model, ids, torch.tensor([lengths[i] for i in chosen]))
            output = body(**inputs, use_cache=False)
        rows = torch.arange(len(chosen))
        last = torch.tensor([lengths[i] for i in chosen]) - 1
        hidden = output.last_hidden_state.cpu()[rows, last]
        found = found.to(torch.promote_types(found.dtype, hidden.dtype))
        found[torch.tensor(chosen)] = hidden.to(found.dtype)
    return found


def mixing_weights(base: Base, requested: Sequence[tuple[State, Sequence[int]]]) -> Tensor:
    """`similarity_weights` (R, 2) of prompts.

    Args:
        asked: (state with the extras ANCHORS and SCALE, token ids of the prompt).
    """
    return similarity_weights(features(base, [prompt for _, prompt in requested]), [state for state, _ in requested])


def similarity_weights(found: Tensor, states: Sequence[State]) -> Tensor:
    """Weights (R, 2) of two experts for each prompt or picture: 1 - alpha(x) and alpha(x).

    alpha(x) is the mean cosine of h(x) with the state's stored anchors, times its scale, clipped to [0, 1]
    (Yang et al. 2024, instance-wise dynamic weighting).

    Args:
        found: h (R, H), the base's features of each.
        states: of each, with the extras ANCHORS (S, H) and SCALE.
    """
    weights = torch.zeros(len(states), 2, dtype=found.dtype)
    for row, state in enumerate(states):
        anchors = state.extras[ANCHORS].to(found)
        cosine = torch.nn.functional.cosine_similarity(found[row], anchors, dim=-1)
        alpha = (state.extras[SCALE].to(found) * cosine.mean()).clamp(0, 1)
        weights[row] = torch.stack([1 - alpha, alpha])
    return weights
