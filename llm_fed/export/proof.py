"""Checks that a folder holds the model that was scored: it is loaded anew and must compute what base and adapter do.

Shape letters: T positions whose logits are compared, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.rng import generator
from llm_fed.kinds.language import Language, load_base
from llm_fed.models.base import Base
from llm_fed.models.lora import Lora
from llm_fed.models.prompt import Prompt, read_prompt
from llm_fed.models.rotary import context
from llm_fed.settings.config import BaseConfig
from llm_fed.state import State
from llm_fed.tasks.templates import encode_prompt

# Several scripts, control tokens spelled out, and spaces that a tokenizer may lose; drawn tokens follow.
TEXT = "Répondez: what is 12 + 30, <s>x</s> or <|im_end|>?  two  spaces,\n\na line\tand a tab 北京在哪里？ 🙂 Где? "
ASKED = "Which bay?"
_RANDOM = 48  # tokens that are drawn
_ANSWER = 8  # tokens of the greedy answer
_LONGEST = 4096  # tokens of a prompt
# Of the logits, the largest distance relative to their length, by dtype. In half precision folding rounds each weight:
# on a model of 30 layers bfloat16 gave up to 0.054, and float32 less than 0.00001.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


@dataclass(frozen=True)
class Probe:
    """What a model does, by the template of its adapter.

    Attributes:
        text: what it reads, as TEXT and drawn tokens spell it, and `read` the token ids of that.
        asked: the token ids of ASKED, and `answer` those of the greedy answer, without the one that ends it.
        logits: (T, V), float32, of the tokens of the answer and of the one after it; then of the last ones of `read`.
    """

    text: str
    read: list[int]
    asked: list[int]
    answer: list[int]
    logits: Tensor


def probe(base: Language, structure: Lora, state: State, prompt: Prompt) -> Probe:
    """What a base with an adapter does, as it is scored. RunError: it computes NaN."""
    size = min(len(base.tokenizer), base.rows)
    drawn = torch.randint(size, (_RANDOM,), generator=generator(0, "proof")).tolist()
    text = TEXT + str(base.tokenizer.decode(drawn))
    read, asked = (_encoded(base, each, prompt) for each in (text, ASKED))
    answer = list(base.stream(structure, state, asked, _ANSWER))
    with base.bank(structure, state).attached(torch.tensor([0])):
        return Probe(text, read, asked, answer, _logits(base, read, asked, answer))


def check(folder: Path, probed: Probe, base: BaseConfig) -> None:
    """Refuse a folder with another model than was probed. `base`: how that was loaded. RunError: what differs."""
    try:
        whole = load_base(BaseConfig(name=str(folder), dtype=base.dtype), "cpu")
        prompt = read_prompt(folder)
    except UserError as error:
        raise RunError(f"the merged model cannot be loaded: {error}") from error
    assert prompt is not None  # it was written beside the model
    compare(whole, probed, prompt)


def compare(whole: Base, probed: Probe, prompt: Prompt) -> None:
    """Refuse a model that does not do what was probed. `prompt`: how it is asked. RunError: what differs."""
    tolerance, dtype = TOLERANCE[whole.dtype], str(whole.dtype).removeprefix("torch.")
    if [_encoded(whole, each, prompt) for each in (probed.text, ASKED)] != [probed.read, probed.asked]:
        raise RunError("the merged model's tokenizer divides a text into other tokens than the base's")
    row, other = probed.logits, _logits(whole, probed.read, probed.asked, probed.answer)
    distance = ((other - row).norm(dim=-1) / row.norm(dim=-1).clamp(min=1e-6)).max().item()
    if not distance <= tolerance:
        raise RunError(
            f"the merged model's logits are not those of base and adapter: they are {distance:.3g} apart, relative "
            f"to their length, where {tolerance:g} is what {dtype} weights explain"
        )
    if differs := _differs(row[: len(probed.answer) + 1], _greedy(whole, probed.asked), prompt.stop, tolerance):
        raise RunError(f"the merged model's greedy answer is not that of base and adapter: {differs}")


def _encoded(base: Base, text: str, prompt: Prompt) -> list[int]:
    """The last tokens of a prompt that leave room for an answer in the base's context."""
    ids = encode_prompt(text, base.tokenizer, template=prompt.template)
    longest = context(base.model.config) or _LONGEST
    return ids[-max(1, min(longest - _ANSWER - 1, _LONGEST)) :]


@torch.inference_mode()
def _logits(base: Base, read: Sequence[int], asked: Sequence[int], answer: Sequence[int]) -> Tensor:
    """As in `Probe`; centred, as a constant added to all logits changes nothing: (T, V)."""
    kept = []
    for tokens, last in (([*asked, *answer], len(answer) + 1), (read, _ANSWER)):
        ids = torch.tensor([tokens], device=base.model.device)
        with base.computing():
            logits = base.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        kept.append(logits[-last:].float().cpu())
    found = torch.cat(kept)
    if not found.isfinite().all():
        raise RunError(f"{base.name!r} computes NaN or infinite logits in {base.dtype}, so it cannot be compared")
    return found - found.mean(-1, keepdim=True)


@torch.inference_mode()
def _greedy(base: Base, prompt: Sequence[int]) -> list[int]:
    """The answer of transformers' own `generate`, by the generation_config.json of the folder."""
    ids = torch.tensor([prompt], device=base.model.device)
    with base.computing():
        output = base.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=_ANSWER)
    return list(output[0, len(prompt) :].tolist())


def _differs(logits: Tensor, answer: Sequence[int], stop: Sequence[int], tolerance: float) -> str:
    """Where an answer is not the greedy one of logits (T, V), though no two tokens are as likely; or nothing."""
    for index, row in enumerate(logits[:_ANSWER]):
        best = int(row.argmax())
        if index >= len(answer):
            return f"it ends before token {index + 1}"
        if answer[index] != best:
            alike = (row[best] - row[answer[index]]).item() <= tolerance * row.abs().max().item()
            return "" if alike else f"token {index + 1} is {answer[index]} instead of {best}"
        if best in stop:
            return ""
    return ""
