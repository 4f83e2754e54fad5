"""What every task shares: examples, pictures, clients, prompt templates, tokens with a loss mask, held-out splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from jinja2 import TemplateError

from llm_fed.errors import UserError, lookup
from llm_fed.rng import derive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

TEMPLATES: dict[str, str | None] = {
    "alpaca": (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{prompt}\n\n### Response:\n"
    ),
    "alpaca-short": "### Instruction:\n{prompt}\n\n### Response:\n",
    "plain": "{prompt}\n",
    "chat": None,  # the tokenizer's own chat template
}
# LLaMA-3.2's chat template writes today's date unless it is given one; a run must not depend on the day.
DATE = "26 Jul 2024"


@dataclass(frozen=True)
class Template:
    """What is put around a prompt."""

    name: str
    text: str  # with {prompt} in the prompt's place; with a date a chat template
    date: str | None = None  # that the chat template writes


def template_of(name: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """A template by name, or of a text that has {prompt} in it.

    Raises:
        UserError: an unknown name, or `chat` with a tokenizer that has no chat template.
    """
    text = name if "{prompt}" in name else lookup("task.template", name, TEMPLATES)
    if text is not None:
        return Template(name, text)
    if not tokenizer.chat_template:
        raise UserError(
            f"task.template=chat, but the tokenizer of {tokenizer.name_or_path!r} has no chat template; "
            "use task.template=alpaca-short, or an instruction-tuned base"
        )
    return Template(name, tokenizer.get_chat_template(), DATE)


class Turn(NamedTuple):
    """A message of a conversation."""

    role: str  # system | user | assistant
    content: str


@dataclass(frozen=True)
class Example:
    """One prompt and its answers: the first is the training target, a metric takes the best of all."""

    prompt: str | tuple[Turn, ...]  # a text, or a conversation up to the turn that answers it
    answers: tuple[str, ...]
    options: tuple[str, ...] = ()  # what may be answered, for option scoring; empty: free text
    group: str = ""  # the label that a partition by label divides by, e.g. the original task


@dataclass(frozen=True, eq=False)
class Picture:
    """One labelled image; the pixels of a data set's pictures are views of one tensor."""

    pixels: torch.Tensor = field(repr=False)  # (C, H, W) uint8, C = 1 (grey) or 3 (RGB)
    label: int
    group: str  # the label that a partition by label divides by, e.g. the fine class


def text_of(prompt: str | Sequence[Turn]) -> str:
    """A prompt as one text, for who reads it."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn.role}: {turn.content}" for turn in prompt)


def pixels_of(pictures: Sequence[Picture]) -> torch.Tensor:
    """(N, C, H, W) uint8, of pictures of one size."""
    return torch.stack([picture.pixels for picture in pictures])


def labels_of(pictures: Sequence[Picture]) -> torch.Tensor:
    """(N,)"""
    return torch.tensor([picture.label for picture in pictures])


@dataclass(frozen=True)
class ClientData:
    """One client's Examples or Pictures. Loaders may leave validation and test empty; `llm_fed.tasks.load` fills
    them."""

    client: str
    train: Sequence[Any]
    validation: Sequence[Any] = ()
    test: Sequence[Any] = ()


@dataclass(frozen=True)
class TaskData:
    """All clients of a task, in an order that depends on the data and the seed alone."""

    name: str
    metric: str
    clients: dict[str, ClientData]
    labels: tuple[str, ...] = ()  # names of the classes of pictures, by label; empty: text
    server: ClientData | None = None  # the server's own data: what it trains on, and the test set of one model for all
    server_labels: tuple[str, ...] = ()  # names of the classes of server.train, where it is another task's
    # All clients of the data in their order, those too that `clients` lacks, as they have no example.
    everybody: tuple[str, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """Token ids of one sequence (T), and for each whether its prediction counts in the loss (T)."""

    input_ids: list[int]
    target: list[bool]

    @property
    def prompt(self) -> list[int]:
        """The ids before the first that counts in the loss; all ids where all but the first count."""
        start = self.target.index(True)
        return self.input_ids[:start] if start > 1 else self.input_ids


def encode_prompt(
    prompt: str | Sequence[Turn | Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, *, template: str | Template
) -> list[int]:
    """The ids that a response follows; equal in training, generation and option scoring.

    Whether they begin with BOS (once) is the tokenizer's own rule: LLaMA's yes, GPT-2's and Qwen's no. An EOS
    that a tokenizer appends to every text is removed. With `chat` all special tokens are the template's.

    Args:
        prompt: a text, or with a chat template a conversation: role and content of each message.
        template: by name, or itself.

    Raises:
        UserError: see `template_of`, or a chat template that fails, or a conversation where there is none.
    """
    if isinstance(template, str):
        template = template_of(template, tokenizer)
    if template.date is not None:
        try:
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else [each._asdict() if isinstance(each, Turn) else dict(each) for each in prompt],
                chat_template=template.text,
                add_generation_prompt=True,
                return_dict=False,
                date_string=template.date,
            )
        except TemplateError as error:
            raise UserError(f"the chat template of {template.name!r} cannot be applied to a prompt: {error}") from error
        return cast(list[int], chat)
    if not isinstance(prompt, str):
        raise UserError(f"the template {template.name!r} takes one text, not a conversation; give the last message")
    ids = list(tokenizer(template.text.replace("{prompt}", prompt))["input_ids"])
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids


def encode_continuation(
    prompt: str | Sequence[Turn], response: str, tokenizer: PreTrainedTokenizerBase, *, template: str | Template
) -> Encoded:
    """Prompt, response and EOS; the response and the EOS are the target.

    Prompt and response are tokenised separately and concatenated, so no token straddles the border and the
    prompt's tokens are the same whatever the response. The target's log-probabilities add up to the
    log-likelihood of the answer `response`; EOS counts, so an option that begins another is not favoured.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token; set eos_token")
    before = encode_prompt(prompt, tokenizer, template=template)
    after = [*tokenizer(response, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return Encoded(before + after, [False] * len(before) + [True] * len(after))


def fitting(encoded: Encoded, max_length: int, loss_on: str, too_long: str) -> Encoded | None:
    """Training tokens as the task's settings want them; None where they are skipped, or where no target is left.

    Args:
        loss_on: "response" or "all"; the first token is never a target, as nothing comes before it.
        too_long: what becomes of more than `max_length` tokens: "skip", "cut-end" or "cut-start".
    """
    if len(encoded.input_ids) > max_length:
        kept = {"skip": slice(0), "cut-end": slice(max_length), "cut-start": slice(-max_length, None)}[too_long]
        encoded = Encoded(encoded.input_ids[kept], [False, *encoded.target[kept][1:]])
        if not any(encoded.target):
            return None
    if lookup("task.loss_on", loss_on, {"response": False, "all": True}):
        return Encoded(encoded.input_ids, [False] + [True] * (len(encoded.input_ids) - 1))
    return encoded


def hold_out(
    examples: Sequence[Item], share: float, seed: int, client: str, split: str = "validation"
) -> tuple[Sequence[Item], Sequence[Item]]:
    """(kept, held out): `share` of the examples, drawn by (seed, split, client); both keep their order.

    From two examples on, each part has at least one; a single example is kept; share 0 holds nothing out.
    """
    if not 0 <= share < 1:
        raise UserError(f"the {split} share is {share}; it must be at least 0 and below 1")
    if share == 0 or len(examples) < 2:
        return select(examples, range(len(examples))), ()
    count = min(max(round(share * len(examples)), 1), len(examples) - 1)
    rng = np.random.default_rng(derive(seed, split, client))
    chosen = set(rng.choice(len(examples), count, replace=False).tolist())
    kept = [index for index in range(len(examples)) if index not in chosen]
    return select(examples, kept), select(examples, sorted(chosen))


def select(examples: Sequence[Item], places: Sequence[int]) -> Sequence[Item]:
    """Those at these places: in a tuple, or still on the disk where they lie there (`stored.Stored`)."""
    take = getattr(examples, "take", None)
    return tuple(examples[place] for place in places) if take is None else take(places)
