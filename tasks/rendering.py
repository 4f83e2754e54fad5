"""Where the assistant's messages are in what a chat template writes.

The conversation is rendered again with marks around each of these messages, which must change nothing else. So a
template may trim texts, drop reasoning, or write other things around the last message than around those before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from llm_fed.basics.errors import UserError
from llm_fed.tasks.control import THINK, THOUGHT, Marks, reasoning

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
    """A conversation as a chat template writes it, with the spellings of control tokens (of the pattern `control`)
    hidden. `render` writes messages, and the beginning of the next reply if it is asked to."""

    def __init__(
        self,
        render: Callable[[Messages, bool], str],
        messages: Messages,
        marks: Marks,
        asked: bool,
        control: re.Pattern[str],
    ):
        self._render, self.messages, self.marks, self._asked, self._control = render, messages, marks, asked, control
        self.text = render(messages, asked)
        self.spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]

    def replies(self, habits: Habits) -> dict[int, ReplySpan]:
        """By number of the message; without those that are not in the rendering."""
        spans = self._contents()
        spans_of_replies, before = {}, 0
        for place, number in enumerate(self.spoken):
            span = spans[place]
            if span is not None:
                following = next((later[0] for later in spans[place + 1 :] if later), len(self.text))
                start = self._start(self.messages[number], before, span[0], habits)
                spans_of_replies[number] = ReplySpan(
                    start, span[1], self._stop(self.messages[number], span[1], following, habits)
                )
                before = span[1]
        return spans_of_replies

    def _start(self, message: dict[str, Any], before: int, start: int, habits: Habits) -> int:
        """Where the assistant begins to write: with its reasoning if that was kept, else behind the template's text."""
        block = self.text.rfind(THINK, before, start)
        if (
            reasoning(message["content"])
            and block >= 0
            and self.text[block + len(THINK) : start].partition(THOUGHT)[0].strip()
        ):
            return block + len(habits.opened) * self.text.startswith(habits.opened, block)
        lead = habits.lead or ""
        return start - len(lead) * self.text.endswith(lead, before, start)

    def _stop(self, message: dict[str, Any], end: int, following: int, habits: Habits) -> int | None:
        """Behind the token that ends a turn: the first control token behind its text, or behind its calls of tools."""
        for token in self._control.finditer(self.text, end, following):
            if token[0] in habits.ends:
                return token.end()
            if "tool_calls" not in message:
                break
        return None

    def _contents(self) -> list[Span | None]:
        ends = [(number, offset) for number in self.spoken for offset in (0, len(self.messages[number]["content"]))]
        places = self._locate(ends)
        if places is not None and None not in places:
            return [(places[n], places[n + 1]) for n in range(0, len(places), 2)]  # type: ignore[misc]
        return [self._content(number) for number in self.spoken]

    def _content(self, number: int) -> Span | None:
        """Where one message is of which the template drops or changes a part."""
        text = self.messages[number]["content"]
        first, last = self._first(number, _starts(text)), self._first(number, _ends(text))
        if first is not None and last is not None:
            return first, last
        return self._header(number) if "tool_calls" in self.messages[number] else None

    def _first(self, number: int, offsets: Iterable[int]) -> int | None:
        """Where the first of these places in a message's text is that is in the rendering."""
        places = (place for offset in offsets for place in self._locate([(number, offset)]) or ())
        return next((place for place in places if place is not None), None)

    def _header(self, number: int) -> Span | None:
        """Where a message is that has no text of its own: where another text in its place would begin."""
        other = {"role": "assistant", "content": self.marks.spare(1)}
        written = self._render([*self.messages[:number], other, *self.messages[number + 1 :]], self._asked)
        before = written.partition(self.marks.spare(1))[0]
        return (len(before), len(before)) if self.text.startswith(before) else None

    def _locate(self, asked: Sequence[tuple[int, int]]) -> list[int | None] | None:
        """Where these places, (message, offset in its text), are in the rendering, None for one that is not in it; or
        None alone, if marks there change what the template writes."""
        messages = [dict(message) for message in self.messages]
        signs = [self.marks.spare(order + 1) for order in range(len(asked))]
        for (number, offset), sign in reversed([*zip(asked, signs, strict=True)]):
            text = messages[number]["content"]
            messages[number]["content"] = text[:offset] + sign + text[offset:]
        try:
            written = self._render(messages, self._asked)
        except UserError:
            return None
        places: dict[str, int] = {}
        pieces = re.split(f"([{signs[0]}-{signs[-1]}])", written) if signs else [written]
        length = 0
        for order, piece in enumerate(pieces):
            if order % 2:
                places.setdefault(piece, length)
            else:
                length += len(piece)
        return [places.get(sign) for sign in signs] if "".join(pieces[::2]) == self.text else None


def _starts(text: str) -> Iterator[int]:
    """Where a text may begin in a rendering: templates take off line breaks, white space, and reasoning."""
    yield from (0, len(text) - len(text.lstrip("\n")), len(text) - len(text.lstrip()))
    if reasoning(text):
        behind = text.index(THOUGHT) + len(THOUGHT)
        yield from (behind, len(text) - len(text[behind:].lstrip("\n")), reasoning(text))


def _ends(text: str) -> Iterator[int]:
    yield from (len(text), len(text.rstrip("\n")), len(text.rstrip()))
