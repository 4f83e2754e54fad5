"""Tokens of texts in which data stay text: what data spell like a control token (`</s>`, `<|im_end|>`) is never one.

A text in which some parts are data is *marked*: in the data, each spelling of a control token is replaced by one
private-use character that occurs nowhere else in it. So a chat template can be rendered with marked contents, and what
still reads like a control token in the rendering was written by the template.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, count, islice, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

from tokenizers import AddedToken, Tokenizer

from llm_fed.basics.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, THOUGHT = "<think>", "</think>"
_HALVES = re.compile("[\ud800-\udfff]")
_SIGN = f"\U0010fffd{secrets.token_hex(8)}:"  # of a name that nobody can guess
_CUT = f"{_SIGN}cut"
_TAG, _SHAPE = re.compile(r"</?[\w.:-]+>"), re.compile(r"<[|\uff5c].*[|\uff5c]>")
_ROOM = 0x7000  # private-use characters that one text may need
_FIRST = (0x108000, 0x100000, 0xF8000, 0xF0000)  # where they may begin; fonts have icons in these ranges, too
# A reply's reasoning before its answer: a block in tags, or what stands above a closing tag with a line of its own.
_REASONING = re.compile(
    rf"\s*(?:{THINK}.*?{THOUGHT}|(?!{THOUGHT})\S(?:(?!{THINK}).)*?\n{THOUGHT}(?=\s*\n))\s*", re.DOTALL
)


def without_surrogates(text: str) -> str:
    """The text with U+FFFD instead of halves of characters (lone surrogates), which no tokenizer takes."""
    return _HALVES.sub("\ufffd", text)


def reasoning(reply: str) -> int:
    """Where a reply goes on behind the block of reasoning that it begins with, and behind white space; 0: without."""
    block = _REASONING.match(reply) if THOUGHT in reply else None
    return block.end() if block else 0


def answer_of(reply: str) -> str:
    """A generated reply without the block of reasoning that it begins with; empty where that never ends."""
    if not reply.lstrip().startswith(THINK):
        return reply
    return reply[reasoning(reply) :] if THOUGHT in reply else ""


class Marks:
    """The private-use characters of one text that is marked, in which control tokens are spelled (`spelled`), and what
    they stand for; `texts` are all data that will be in it."""

    def __init__(self, spelled: Sequence[str], texts: Iterable[str]):
        used = {char for text in texts if not text.isascii() for char in text if char >= chr(_FIRST[-1])}
        free = (first for first in _FIRST if not any(chr(first) <= char < chr(first + _ROOM) for char in used))
        first = next(free, None)
        if first is None:
            raise UserError("a text uses all of Unicode's private-use characters; leave it out")
        self._first, self._spelled = first, spelled
        self._mark_of = {text: chr(first + position) for position, text in enumerate(spelled)}
        self.hidden = re.compile(f"[{chr(first)}-{chr(first + len(spelled) - 1)}]") if spelled else re.compile("(?!)")
        self._extra = first + len(spelled)

    def spare(self, number: int) -> str:
        """A character that stands for nothing; another one for each number."""
        if self._extra + number >= self._first + _ROOM:
            raise UserError("a conversation has too many turns for one text; split it")
        return chr(self._extra + number)

    def hide(self, text: str, pattern: re.Pattern[str]) -> str:
        """Data as they stand in a marked text; `pattern` is that of the control tokens."""
        return pattern.sub(lambda match: self._mark_of[match[0]], text)

    def hide_reply(self, text: str, pattern: re.Pattern[str]) -> str:
        """A message of the assistant, in which the tags of its reasoning are no spellings."""
        if not reasoning(text):
            return self.hide(text, pattern)
        before, _, behind = text.partition(THOUGHT)
        opening, tag, inner = before.partition(THINK) if before.lstrip().startswith(THINK) else ("", "", before)
        return f"{opening}{tag}{self.hide(inner, pattern)}{THOUGHT}{self.hide(behind, pattern)}"

    def plain(self, text: str) -> str:
        """A marked text as it reads, with the texts that the characters of `hidden` stand for."""
        return self.hidden.sub(lambda match: self._spelled[ord(match[0]) - self._first], text)


class _Segment(NamedTuple):
    """A text that is read behind another one."""

    text: str
    spelling: int = 0  # the number of a control token that data spell; 0: none
    loose: bool = True  # whether it may begin within a token


class SafeTokenizer:
    """Reads marked texts with a tokenizer of the `tokenizers` library.

    It works with a copy of the tokenizer that shares its model and in which the control tokens have names that nobody
    can type. Control tokens that a template wrote get these names first; all others are plain text to the copy. So a
    text without hidden spellings has exactly the tokens of the tokenizer itself, and hidden spellings have those of
    `split_special_tokens=True`. `template`: the text of the template; it may write control tokens that are not declared
    as special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str):
        self.tokenizer = tokenizer
        self.spelled = control_tokens(tokenizer, template)  # as texts
        self.pattern = re.compile("|".join(map(re.escape, sorted(self.spelled, key=len, reverse=True))))

    def is_plain(self, text: str) -> bool:
        return self.pattern.search(text) is None and (text.isascii() or not _HALVES.search(text))

    def spells(self, text: str) -> str | None:
        """The first control token of this tokenizer that the text spells."""
        return next((match[0] for match in self.pattern.finditer(text) if match[0] in self._names), None)

    def encode(self, segments: Sequence[str], marks: Marks, loose: Collection[int] = ()) -> list[list[int]]:
        """The tokens of the segments of one marked text, without any that the tokenizer would add around it. None is of
        two segments, but that a segment which is `loose`, by its index, may begin within a token of the one before.
        UserError where the tokenizer is not of the `tokenizers` library, or cannot write a spelling as text."""
        texts = (match[0] for segment in segments for match in self.pattern.finditer(segment))
        written = sum(self.tokenizer.convert_tokens_to_ids(text) in self._control for text in texts)
        broken: set[int] = set()  # what data spell that the vocabulary holds as a word, too, by its number
        while True:
            numbers = count(1)
            parts = [self._read_as(text, at in loose, marks, numbers, broken) for at, text in enumerate(segments)]
            every = [*chain.from_iterable(parts)]
            tokens = self._read(every, marks, first=True)
            control = [sum(id in self._control for id in ids) for ids in tokens or ()]
            forged = {part.spelling for part, number in zip(every, control, strict=False) if part.spelling and number}
            if tokens is not None and not forged and sum(control) == written:
                remaining = iter(tokens)
                return [[*chain.from_iterable(islice(remaining, len(own)))] for own in parts]
            if forged <= broken:
                raise UserError(
                    f"the tokenizer of {self.tokenizer.name_or_path!r} has no text for what spells a control token in "
                    f"{marks.plain(''.join(segments))[:60]!r}; leave the example out, or choose another base"
                )
            broken |= forged

    def _read_as(
        self, marked: str, loose: bool, marks: Marks, numbers: Iterator[int], broken: Collection[int]
    ) -> list[_Segment]:
        """A marked text as the copy is to read it: the template's control tokens have new names, and data stay as they
        are. Of their spellings only the `broken` ones, by number, are parted, behind the first letter."""
        parts = []
        for piece in re.split(f"({marks.hidden.pattern})", marked):
            if (text := marks.plain(piece)) == piece:
                parts.append(_Segment(self.pattern.sub(lambda match: self._names.get(match[0], match[0]), piece)))
            elif (number := next(numbers)) in broken:
                parts += [_Segment(text[:1], number), _Segment(text[1:], number, loose=False)]
            else:
                parts.append(_Segment(text, number))
        return [parts[0]._replace(loose=loose), *parts[1:]]

    def _read(self, parts: Sequence[_Segment], marks: Marks, first: bool) -> list[list[int]] | None:
        """The tokens of texts that follow each other. Where a token would be of two of them, what is before is read as
        if the text ended there, and what follows, unless it is `first`, as in the middle of a text: behind a sign that
        is taken away again. None where that has a token with the text."""
        twin, original = self._twin
        for sign in [""] if first else [_CUT] if self._cuts_well else [marks.spare(0), _CUT]:
            encoding = twin.encode(sign + "".join(part.text for part in parts), add_special_tokens=False)
            starts, stops = [start for start, _ in encoding.offsets], [stop for _, stop in encoding.offsets]
            begins = list(accumulate((len(part.text) for part in parts), initial=len(sign)))
            over = [
                number
                for number, begin in enumerate(begins[:-1])
                if bisect_left(starts, begin) > bisect_right(stops, begin) and not (number and parts[number].loose)
            ]
            if not over:
                ids = [original.get(id, id) for id in encoding.ids]
                return [ids[bisect_left(starts, one) : bisect_left(starts, next)] for one, next in pairwise(begins)]
            if over[0]:
                before = self._read(parts[: over[0]], marks, first)
                behind = self._read(parts[over[0] :], marks, first=False)
                return None if before is None or behind is None else [*before, *behind]
        return None

    @cached_property
    def _cuts_well(self) -> bool:
        """Whether what follows a control token is read as in the middle of a text. LLaMA's begins with a space there;
        so a private-use character takes the control token's place, which is not part of any word either."""
        twin, _ = self._twin
        after = [twin.encode(f"{before}a", add_special_tokens=False).tokens[1:] for before in (_CUT, "\n")]
        return after[0] == after[1]

    @cached_property
    def _control(self) -> set[int]:
        ids = {cast(int, self.tokenizer.convert_tokens_to_ids(text)) for text in self._names}
        return ids - {self.tokenizer.unk_token_id}  # which is any unknown word

    @cached_property
    def _names(self) -> dict[str, str]:
        """Of the control tokens that are tokens of their own."""
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        return {text: f"{_SIGN}{position}{_SIGN}" for position, text in enumerate(self.spelled) if text in added}

    @cached_property
    def _twin(self) -> tuple[Tokenizer, dict[int, int]]:
        """The copy, and its ids of added tokens -> those of the tokenizer itself."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None) if self.tokenizer.is_fast else None
        if backend is None:
            raise UserError(
                f"the tokenizer of {self.tokenizer.name_or_path!r} ({type(self.tokenizer).__name__}) does not say "
                "where in a text a token is; choose a base with a tokenizer.json"
            )
        twin = Tokenizer(backend.model)
        if backend.normalizer is not None:
            twin.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            twin.pre_tokenizer = backend.pre_tokenizer
        added = self.tokenizer.added_tokens_decoder
        names = {id: self._names.get(token.content, token.content) for id, token in added.items()}
        twin.add_tokens([_renamed(token, names[id]) for id, token in added.items()])
        twin.add_tokens([AddedToken(_CUT, normalized=False)])
        return twin, {number: id for id, name in names.items() if (number := twin.token_to_id(name)) is not None}


def _renamed(token: AddedToken, name: str) -> AddedToken:
    strips = {"lstrip": token.lstrip, "rstrip": token.rstrip}
    normalized = token.normalized and name == token.content
    return AddedToken(name, single_word=token.single_word, normalized=normalized, **strips)


def control_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, ...]:
    """What a template may write and data may not: special tokens; other added tokens of the form `<|...|>`, or that the
    template's text names, but for tags (`<b>`), which are ordinary text; and the tags of reasoning. White space is
    always ordinary text."""
    found = {*tokenizer.all_special_tokens, THINK, THOUGHT}
    for token in tokenizer.added_tokens_decoder.values():
        named = token.content in template and not _TAG.fullmatch(token.content)
        if token.special or named or _SHAPE.fullmatch(token.content):
            found.add(token.content)
    return tuple(sorted(text for text in found if text.strip()))
