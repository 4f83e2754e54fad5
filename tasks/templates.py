"""Templates around prompts, texts with {prompt} in them or chat templates, and the tokens of what fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from llm_fed.basics.errors import UserError, lookup
from llm_fed.tasks.chat import ChatTemplate, answering
from llm_fed.tasks.common import TEMPLATES, Encoded, Example, Template, Turn
from llm_fed.tasks.control import THINK, Marks, SafeTokenizer, without_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# LLaMA-3.2's chat template writes today's date unless it is given one; a run must not depend on the day.
DATE = "26 Jul 2024"
BARE = Template("{prompt}", "{prompt}")  # around an empty prompt, whose answer is a text that is learned as it stands
Prompt = str | Sequence[Turn | Mapping[str, str]]  # a text, or the messages of a conversation


def template_of(name: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """A template by name, or of a text that has {prompt} in it, which loses a BOS at its beginning where the tokenizer
    puts one before every text; of a chat template see `chat.answering`. UserError for an unknown name, or `chat` with a
    tokenizer that has no chat template."""
    text = name if "{prompt}" in name else lookup("task.template", name, TEMPLATES)
    if text is not None:
        bos = tokenizer.bos_token
        if bos and text.startswith(bos) and around(tokenizer)[0][-1:] == [tokenizer.bos_token_id]:
            text = text.removeprefix(bos)
        return Template(name, text)
    if not tokenizer.chat_template:
        raise UserError(
            f"task.template=chat, but the tokenizer of {tokenizer.name_or_path!r} has no chat template; "
            "use task.template=alpaca-short, or an instruction-tuned base"
        )
    return Template(name, answering(tokenizer.get_chat_template(), tokenizer, DATE), DATE)


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, template: str | Template) -> list[int]:
    """The ids that a response follows; equal in training, generation and option scoring.

    Whether they begin with BOS (once) is the tokenizer's own rule: LLaMA's yes, GPT-2's and Qwen's no. An EOS that a
    tokenizer appends to every text is removed. With `chat` all special tokens are the template's. What a prompt, a text
    or a conversation, spells like a special token is text. UserError as in `template_of`, where a chat template fails,
    and for messages of a tool in a text template."""
    return filled(template if prompt else BARE, tokenizer).prompt(as_turns(prompt))


def encoded(example: Example, tokenizer: PreTrainedTokenizerBase, template: str | Template) -> Encoded:
    """The example with its first answer and the token that ends it; of a conversation every turn of the assistant that
    is trained is a target, else the answer alone.

    No token is part of both, so that the prompt's tokens are the same whatever the answer. The target's
    log-probabilities add up to the log-likelihood of the answer; the token that ends it counts, so an option that
    begins another is not favoured.
    """
    last = Turn("assistant", example.answers[0], fields=example.fields)
    return filled(template if example.prompt else BARE, tokenizer).conversation([*as_turns(example.prompt), last])


@dataclass(eq=False)
class TextTemplate:
    """A text with {prompt} in it. A conversation is the text for each of its messages of the user, in turn, with the
    answer and EOS behind each; a system text stands before the first of them, and an empty line between."""

    template: Template
    tokenizer: PreTrainedTokenizerBase
    safe: SafeTokenizer
    ends: ClassVar[list[int]] = []  # besides EOS

    @property
    def opens(self) -> bool:
        return self.template.text.rstrip().endswith(THINK)

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """The tokens that the next answer follows; UserError where there are messages of tools."""
        return self.conversation(turns).input_ids

    def conversation(self, turns: Sequence[Turn]) -> Encoded:
        """A conversation that ends with an answer; the targets are the trained answers, each with EOS. UserError as in
        `prompt`, or where the tokenizer has no EOS."""
        ids: list[int] = []
        target: list[bool] = []
        before: str | None = ""  # what stands before the first message of the user; None behind it
        for turn in turns:
            if turn.role == "tool" or turn.fields:
                raise UserError(
                    f"the template {self.template.name!r} has no place for calls of tools; set task.template=chat, or "
                    "leave these conversations out"
                )
            if turn.role == "system":
                before = f"{turn.content}\n\n"
                continue
            if turn.role == "user":
                more, before = self._asked((before or "") + turn.content, first=before is not None), None
            else:
                more = self._answer(turn.content)
            ids += more
            target += [turn.role == "assistant" and turn.trained] * len(more)
        return Encoded(ids, [False, *target[1:]] if ids else [])  # nothing comes before the first token

    def _asked(self, text: str, first: bool) -> list[int]:
        """The template around a message of the user; BOS stands before the first alone."""
        text, bos = without_surrogates(text), self.tokenizer.bos_token
        around_it = self.template.text if first or not bos else self.template.text.removeprefix(bos)
        if self.safe.is_plain(text):
            written = around_it.replace("{prompt}", text)
            ids = list(self.tokenizer(written, add_special_tokens=first)["input_ids"])
        else:
            marks = Marks(self.safe.spelled, [text, around_it])
            marked = around_it.replace("{prompt}", marks.hide(text, self.safe.pattern))
            begins, ends = around(self.tokenizer) if first else ([], [])
            ids = [*begins, *self.safe.encode([marked], marks)[0], *ends]
        return ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids

    def _answer(self, text: str) -> list[int]:
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer of {self.tokenizer.name_or_path!r} has no EOS token; set eos_token")
        text = without_surrogates(text)
        if self.safe.is_plain(text):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            marks = Marks(self.safe.spelled, [text])
            (ids,) = self.safe.encode([marks.hide_reply(text, self.safe.pattern)], marks)
        return [*ids, self.tokenizer.eos_token_id]


def filled(template: str | Template, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | TextTemplate:
    """What fills this template, by name or itself; UserError as in `template_of`."""
    template = template_of(template, tokenizer) if isinstance(template, str) else template
    return _filled(template, tokenizer)


@lru_cache(maxsize=4)
def _filled(template: Template, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | TextTemplate:
    if template.date is not None:
        return ChatTemplate(template, tokenizer)
    return TextTemplate(template, tokenizer, SafeTokenizer(tokenizer, template.text))


def around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before every text, and behind it."""
    bare, full = (list(tokenizer("a", add_special_tokens=add)["input_ids"]) for add in (False, True))
    start = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), len(full))
    return full[:start], full[start + len(bare) :]


def as_turns(prompt: Prompt) -> list[Turn]:
    if isinstance(prompt, str):
        return [Turn("user", prompt)]
    return [Turn(each["role"], each["content"]) if isinstance(each, Mapping) else each for each in prompt]
