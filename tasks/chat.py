"""Conversations in a chat template: what of its text is prompt, what the assistant writes, and where a turn ends.

Where the assistant's messages are is found out by rendering the conversation again with marks around each of them,
which must change nothing else. So a template may trim texts, drop reasoning, or write other things around the last
message than around those before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from llm_fed.basics.errors import UserError, one_line
from llm_fed.tasks.common import Encoded, Item, Template, Turn
from llm_fed.tasks.control import THINK, THOUGHT, Marks, SafeTokenizer, reasoning, without_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
Span = tuple[int, int]


class ReplySpan(NamedTuple):
    """A message of the assistant in a marked rendering."""

    start: int  # of what the assistant writes
    end: int  # of its text
    stop: int | None  # behind the token that ends the turn; None where the template writes none


class Habits(NamedTuple):
    """What a chat template writes around every reply."""

    # between its generation prompt and the reply; None where a conversation does not go on as that prompt begins
    lead: str | None = None
    opened: str = ""  # the tag of reasoning that ends the generation prompt, with the white space behind it
    ends: frozenset[str] = frozenset()  # the control tokens that end a turn of the assistant


class Rendering:
    """A conversation as a chat template writes it, with the spellings of control tokens hidden, and the beginning of
    the next reply if it is `requested`. UserError where the template drops what a tool was asked, or what it said."""

    def __init__(self, chat: ChatTemplate, turns: Sequence[Turn], requested: bool):
        self._chat, self._requested, self._control = chat, requested, chat.safe.pattern
        contents = [without_surrogates(turn.content) for turn in turns]
        self.marks = Marks(chat.safe.spelled, [*contents, *(turn.fields for turn in turns)])
        self.messages: Messages = []
        for turn, content in zip(turns, contents, strict=True):
            hide = self.marks.hide_reply if turn.role == "assistant" else self.marks.hide
            more = self._hidden(json.loads(without_surrogates(turn.fields))) if turn.fields else {}
            self.messages.append({"role": turn.role, "content": hide(content, self._control), **more})
        self.text = chat.render(self.messages, requested)
        self.spoken = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
        self._check_tools()

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.marks.hide(value, self._control)
        if isinstance(value, list):
            return [self._hidden(each) for each in value]
        return {key: self._hidden(each) for key, each in value.items()} if isinstance(value, dict) else value

    def _check_tools(self) -> None:
        for message in self.messages:
            names = [(call.get("function") or call).get("name", "") for call in message.get("tool_calls", ())]
            said = [message["content"].strip()] if message["role"] == "tool" else []
            if not all(text in self.text for text in [*names, *said]):
                raise UserError(
                    f"the chat template of {self._chat.tokenizer.name_or_path!r} does not write "
                    + (f"the call of the tool {one_line(names[0])!r}" if names else "messages of a tool")
                    + "; leave these conversations out, or choose a base whose template does"
                )

    def replies(self, habits: Habits) -> dict[int, ReplySpan]:
        """By number of the message; without those that are not in the rendering."""
        spans = self._contents()
        found, before = {}, 0
        for position, (number, span) in enumerate(zip(self.spoken, spans, strict=True)):
            if span is not None:
                message = self.messages[number]
                following = next((later[0] for later in spans[position + 1 :] if later), len(self.text))
                start = self._start(message["content"], before, span[0], habits)
                stop = self._stop("tool_calls" in message, span[1], following, habits)
                found[number] = ReplySpan(start, span[1], stop)
                before = span[1]
        return found

    def _start(self, content: str, before: int, start: int, habits: Habits) -> int:
        """Where the assistant begins to write: with its reasoning if that was kept, else behind the template's text."""
        block = self.text.rfind(THINK, before, start)
        thought = self.text[block + len(THINK) : start].partition(THOUGHT)[0]
        if reasoning(content) and block >= 0 and thought.strip():
            return block + len(habits.opened) * self.text.startswith(habits.opened, block)
        lead = habits.lead or ""
        return start - len(lead) * self.text.endswith(lead, before, start)

    def _stop(self, calls: bool, end: int, following: int, habits: Habits) -> int | None:
        """Behind the token that ends a turn: the first control token behind its text, or behind its calls of tools."""
        for token in self._control.finditer(self.text, end, following):
            if token[0] in habits.ends:
                return token.end()
            if not calls:
                break
        return None

    def _contents(self) -> list[Span | None]:
        ends = [(number, offset) for number in self.spoken for offset in (0, len(self.messages[number]["content"]))]
        positions = self._locate(ends)
        if positions is not None and None not in positions:
            return [(positions[n], positions[n + 1]) for n in range(0, len(positions), 2)]  # type: ignore[misc]
        return [self._content(number) for number in self.spoken]

    def _content(self, number: int) -> Span | None:
        """Where one message is of which the template drops or changes a part."""
        text = self.messages[number]["content"]
        first, last = self._first(number, _starts(text)), self._first(number, _ends(text))
        if first is not None and last is not None:
            return first, last
        return self._header(number) if "tool_calls" in self.messages[number] else None

    def _first(self, number: int, offsets: Iterable[int]) -> int | None:
        """Where the first of these indices in a message's text is that is in the rendering."""
        positions = (position for offset in offsets for position in self._locate([(number, offset)]) or ())
        return next((position for position in positions if position is not None), None)

    def _header(self, number: int) -> Span | None:
        """Where a message is that has no text of its own: where another text in its place would begin."""
        other = {"role": "assistant", "content": self.marks.spare(1)}
        written = self._chat.render([*self.messages[:number], other, *self.messages[number + 1 :]], self._requested)
        before = written.partition(self.marks.spare(1))[0]
        return (len(before), len(before)) if self.text.startswith(before) else None

    def _locate(self, requested: Sequence[tuple[int, int]]) -> list[int | None] | None:
        """Where these indices, (message, offset in its text), are in the rendering, None for one that is not in it; or
        None alone, if marks there change what the template writes."""
        messages = [dict(message) for message in self.messages]
        signs = [self.marks.spare(order + 1) for order in range(len(requested))]
        for (number, offset), sign in reversed([*zip(requested, signs, strict=True)]):
            text = messages[number]["content"]
            messages[number]["content"] = text[:offset] + sign + text[offset:]
        try:
            written = self._chat.render(messages, self._requested)
        except UserError:
            return None
        positions: dict[str, int] = {}
        pieces = re.split(f"([{signs[0]}-{signs[-1]}])", written) if signs else [written]
        length = 0
        for order, piece in enumerate(pieces):
            if order % 2:
                positions.setdefault(piece, length)
            else:
                length += len(piece)
        return [positions.get(sign) for sign in signs] if "".join(pieces[::2]) == self.text else None


def _starts(text: str) -> Iterator[int]:
    """Where a text may begin in a rendering: templates take off line breaks, white space, and reasoning."""
    yield from (0, len(text) - len(text.lstrip("\n")), len(text) - len(text.lstrip()))
    if reasoning(text):
        behind = text.index(THOUGHT) + len(THOUGHT)
        yield from (behind, len(text) - len(text[behind:].lstrip("\n")), reasoning(text))


def _ends(text: str) -> Iterator[int]:
    yield from (len(text), len(text.rstrip("\n")), len(text.rstrip()))


GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")  # how a chat template marks what the assistant writes
# Of the conversation by which a template's habits are found. Most tokenizers have a token of a space and "the".
_USER, _REPLY = "Which one?", "the first"


class ChatTemplate:
    """A chat template with the tokenizer that reads what it writes."""

    def __init__(self, template: Template, tokenizer: PreTrainedTokenizerBase):
        self.template, self.tokenizer = template, tokenizer
        self.safe = SafeTokenizer(tokenizer, template.text)
        self._marked = GENERATION.search(template.text) is not None

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """What the assistant's next message follows; UserError where the template fails, or takes no tools."""
        rendering = Rendering(self, self._taken(turns), requested=True)
        return self._encoded(rendering, rendering.replies(self.habits)).input_ids

    def conversation(self, turns: Sequence[Turn]) -> Encoded:
        """A conversation that ends with the assistant. The targets are what the assistant writes in the turns that are
        trained, each with the token that ends it; where the template writes none behind the last, EOS is put there.
        UserError as in `prompt`, or where a message that is trained is not in the rendering."""
        turns = self._taken(turns)
        apart = self.habits.lead is None  # the rendering does not go on where the prompt of an evaluation ends
        rendering = Rendering(self, turns[:-1] if apart else turns, requested=apart)
        replies = rendering.replies(self.habits)
        self._check_written(turns, rendering, replies)
        found = self._encoded(rendering, replies, turns)
        more: list[int] = []
        if apart:
            text = without_surrogates(turns[-1].content)
            marks = Marks(self.safe.spelled, [text])
            (reply,) = self.safe.encode([marks.hide_reply(text, self.safe.pattern)], marks)
            more = [*reply, self._eos]
        elif not any(found.target):
            raise UserError("the chat template marks no token of a conversation as the assistant's")
        elif replies[len(turns) - 1].stop is None:
            more = [self._eos]
        return Encoded([*found.input_ids, *more], [*found.target, *[True] * len(more)])

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end a turn of the assistant; none where the template writes none."""
        return [cast(int, self.tokenizer.convert_tokens_to_ids(text)) for text in sorted(self.habits.ends)]

    @property
    def opens(self) -> bool:
        return self.habits.opened != ""

    @property
    def closes(self) -> bool:
        """Whether the generation prompt ends where the assistant's own text begins, so that a prompt has the same
        tokens in training and in evaluation. White space between the two is the assistant's if it is in one token with
        its text."""
        lead = self.habits.lead
        if not lead or not lead.isspace():
            return lead == ""
        prompt, written = (Rendering(self, turns, requested=not n) for n, turns in enumerate((_PROBE[:1], _PROBE)))
        text, start, marks = written.text, len(prompt.text), written.marks
        (whole,), (alone,) = self.safe.encode([text], marks), self.safe.encode([prompt.text], marks)
        before, behind = self.safe.encode([text[:start], text[start:]], marks)
        own = start + len(lead)
        parted = [*chain.from_iterable(self.safe.encode([text[:own], text[own:]], marks))]
        return before == alone and [*before, *behind] == whole != parted

    @property
    def _eos(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer of {self.tokenizer.name_or_path!r} has no EOS token; set eos_token")
        return cast(int, self.tokenizer.eos_token_id)

    def _taken(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """The turns; where the template takes no system message, its text stands before the first of the user."""
        if len(turns) < 2 or turns[0].role != "system" or self._takes_system:
            return turns
        return [turns[1]._replace(content=f"{turns[0].content}\n\n{turns[1].content}"), *turns[2:]]

    def render(self, messages: Messages, requested: bool) -> str:
        """What the template writes, with the beginning of the next reply if it is `requested`."""
        render = partial(
            self.tokenizer.apply_chat_template, messages, chat_template=self.template.text,
            date_string=self.template.date, add_generation_prompt=requested, tokenize=False,
        )  # fmt: skip
        return str(self._tried(render))

    def _tried(self, render: Callable[[], Item]) -> Item:
        """What `render` makes with the template, in transformers' sandbox; UserError where it fails."""
        try:
            return render()
        except Exception as error:  # of any kind: the template is a program of whoever made the base
            said = one_line(str(error)) or type(error).__name__
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path!r} cannot be applied to a conversation: {said}"
            ) from error

    def _encoded(self, rendering: Rendering, replies: Mapping[int, ReplySpan], turns: Sequence[Turn] = ()) -> Encoded:
        """The tokens of a rendering, up to the last reply where the template writes no end behind it; the targets are
        the replies that are `turns` to be trained."""
        generated = self._generated(rendering) if self._marked and turns else None
        segments, trained, loose, at = list[str](), list[bool](), {0}, 0
        for number, (start, end, stop) in replies.items():
            begin, finish = start, end if stop is None else stop
            if generated is not None:
                own = next((span for span in generated if span[0] <= end and span[1] > start), None)
                begin = finish if own is None else max(start, own[0])
            segments += [rendering.text[at:start], rendering.text[start:begin], rendering.text[begin:finish]]
            trained += [False, False, bool(turns) and turns[number].trained]
            loose |= {len(segments) - 1, *([len(segments)] if stop else [])}
            at = finish
        last = replies.get(len(rendering.messages) - 1)
        if last is None or last.stop is not None:
            segments, trained = [*segments, rendering.text[at:]], [*trained, False]
        found = self.safe.encode(segments, rendering.marks, loose)
        target = [own for own, ids in zip(trained, found, strict=True) for _ in ids]
        return Encoded([*chain.from_iterable(found)], target)

    def _check_written(self, turns: Sequence[Turn], rendering: Rendering, replies: Mapping[int, ReplySpan]) -> None:
        """UserError where a message that is trained is not in the rendering."""
        for number in rendering.spoken:
            if turns[number].trained and number not in replies:
                raise UserError(
                    f"the chat template of {self.tokenizer.name_or_path!r} does not write the assistant's message "
                    f"{one_line(turns[number].content)[:60]!r} as it stands, so that its tokens cannot be found; leave "
                    "this conversation out, or choose another base"
                )

    def _generated(self, rendering: Rendering) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template  # takes a second to import

        given: dict[str, Any] = {**self.tokenizer.special_tokens_map, "date_string": self.template.date}
        given |= {"chat_template": self.template.text, "return_assistant_tokens_mask": True}
        written = self._tried(lambda: render_jinja_template([rendering.messages], **given))
        return cast(list[Span], written[1][0])

    # What the template does with every conversation

    @cached_property
    def habits(self) -> Habits:
        marks = Marks(self.safe.spelled, ())
        first, last, next_one = (marks.spare(number) for number in (1, 2, 3))
        requested, said = {"role": "user", "content": _USER}, {"role": "assistant", "content": f"{first}{_REPLY}{last}"}
        try:
            begun, written = self.render([requested], True), self.render([requested, said], False)
        except UserError:
            return Habits()
        before, _, rest = written.partition(first)
        ends = [stop[0] for stop in [self.safe.pattern.search(rest.partition(last)[2])] if stop]
        try:
            more = self.render([requested, said, {"role": "user", "content": next_one}, said], False)
            ends += self._ends_between(more.partition(_USER)[0], more.partition(last)[2].partition(next_one)[0])
        except UserError:
            pass  # a template of single questions
        opened = re.search(rf"{THINK}\s*$", begun)
        lead = before[len(begun) :] if rest and before.startswith(begun) else None
        return Habits(lead, opened[0] if opened else "", frozenset(ends))

    def _ends_between(self, opening: str, between: str) -> list[str]:
        """The first control token between a reply and the next message of the user that is not of the latter's
        beginning, which also stands before the first message (`opening`)."""
        split = re.compile(f"({self.safe.pattern.pattern})").split
        first, later = split(opening), split(between)
        while first and later and first[-1] == later[-1]:
            first.pop()
            later.pop()
        return [part for part in later if self.safe.pattern.fullmatch(part)][:1]

    def replaced(self) -> str | None:
        """The template with what it writes before a reply instead of its generation prompt, where the two differ
        in reasoning or in white space; None where that is not always the same, or they differ in another way."""
        sign = Marks(self.safe.spelled, ()).spare(1)
        user, reply = {"role": "user", "content": _USER}, {"role": "assistant", "content": sign}
        try:
            plain, begun = self.render([user], False), self.render([user], True)
            before = self.render([user, reply], False).partition(sign)[0]
        except UserError:
            return None
        header, blank = before.removeprefix(plain), before.removeprefix(begun)
        if header == before or not (THINK in begun[len(plain) :] or THOUGHT in header or blank.isspace()):
            return None
        text = _REPLACED % (self.template.text.removesuffix("\n"), json.dumps(header, ensure_ascii=False))
        other = ChatTemplate(replace(self.template, text=text), self.tokenizer)
        system = [{"role": "system", "content": _REPLY}] * self._takes_system
        try:
            for requested in ([user], [*system, user], [user, {**reply, "content": _REPLY}, user]):
                if other.render(requested, True) != other.render([*requested, reply], False).partition(sign)[0]:
                    return None
        except UserError:
            return None
        return text

    @cached_property
    def _takes_system(self) -> bool:
        sign = Marks(self.safe.spelled, ()).spare(1)
        try:
            written = self.render([{"role": "system", "content": sign}, {"role": "user", "content": _USER}], True)
        except UserError:
            return False
        return sign in written


_PROBE = (Turn("user", _USER), Turn("assistant", _REPLY))


# A template that answers without reasoning

_OFF = "{%- set enable_thinking = false %}{{ '' }}"  # the expression keeps the line break that may follow
_REPLACED = (
    "{%%- set answer_begins = add_generation_prompt %%}{%% set add_generation_prompt = false %%}{{ '' }}%s{{ '' }}"
    "{%% if answer_begins %%}{{ %s }}{%% endif %%}"
)
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_DAY = datetime(2024, 7, 26, 12)  # Llama 3.2's own default, for templates that ask for today


@lru_cache(maxsize=4)
def answering(text: str, tokenizer: PreTrainedTokenizerBase, date: str) -> str:
    """A chat template whose generation prompt ends where an answer without reasoning begins, and that knows no today:
    as it stands, with its own switch of reasoning off, or with what it writes before a reply instead of its
    generation prompt. The result is a chat template as well, so that any server can be given it. `date`: for templates
    that are given one."""
    if "strftime_now" in text and "date_string" not in text:
        text = _NOW.sub(lambda call: repr(_DAY.strftime(call[2])), text)
        if "strftime_now(" in text:  # its format is a variable, so that the day cannot be written into the template
            text = f"{{%- macro strftime_now(format) -%}}{_DAY:%d %B %Y}{{%- endmacro %}}{{{{ '' }}}}{text}"
    candidates = [_OFF + text, text] if "enable_thinking" in text else [text]
    for candidate in candidates:
        if ChatTemplate(Template("chat", candidate, date), tokenizer).closes:
            return candidate
    replaced = ChatTemplate(Template("chat", candidates[0], date), tokenizer).replaced()
    return text if replaced is None else replaced
