"""Tokens of texts in which data stay text: what data spell like a control token (`</s>`, `<|im_end|>`) is never one.

A text in which some parts are data is *marked*: in the data, each spelling of a control token is replaced by one
private-use character that occurs nowhere else in it. So a chat template can be rendered with marked contents, and what
still reads like a control token in the rendering was written by the template.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
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


def has_surrogates(text: str) -> bool:
    """Whether `without_surrogates` changes the text."""
    return not text.isascii() and _HALVES.search(text) is not None


def reasoning(reply: str) -> int:
    """Where a reply goes on behind the block of reasoning that it begins with, and behind white space; 0: without."""
    block = _REASONING.match(reply) if THOUGHT in reply else None
    return block.end() if block else 0


def answer_of(reply: str) -> str:
    """A generated reply without the block of reasoning that it begins with; empty where that never ends."""
    if not reply.lstrip().startswith(THINK):
        return reply
    return reply[reasoning(reply) :] if THOUGHT in reply else ""


def read_as_text(spelled: Counter[str], halves: int) -> list[str]:
    """What a user should know of examples that are not read as they stand.

    Args:
        spelled: examples by the first control token that they spell.
        halves: examples with halves of characters.
    """
    said = [f"halves of characters (lone surrogates) in {halves} examples are read as U+FFFD"] if halves else []
    if spelled:
        names = ", ".join(repr(text) for text, _ in spelled.most_common(3))
        said.append(f"{names} in {spelled.total()} examples are read as text, not as control tokens")
    return said


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

    def shown(self, char: str) -> str:
        """The text that a character of `hidden` stands for."""
        return self._spelled[ord(char) - self._first]

    def plain(self, text: str) -> str:
        """A marked text as it reads."""
        return self.hidden.sub(lambda match: self.shown(match[0]), text)


class Tokens(NamedTuple):
    """What a tokenizer made of a marked text."""

    ids: list[int]  # (T)
    spans: list[tuple[int, int]]  # (T): where each begins and ends in what was read
    parts: list[_Piece]
    mixed: set[int]  # indices of separators that are a part of a word

    def position(self, marked: int) -> int:
        """Where a place of the marked text is in what was read; before a separator that stands there."""
        offset = 0
        for part in self.parts:
            if marked <= part.start or marked < part.end:
                return offset + (0 if part.atom else max(0, marked - part.start))
            offset += len(part.text)
        return offset

    def behind(self, marked: int) -> int:
        """The number of the first token that ends behind a place of the marked text."""
        position = self.position(marked)
        return next((number for number, (_, end) in enumerate(self.spans) if end > position), len(self.ids))

    def over(self, marked: int) -> bool:
        """Whether a token stands on both sides of a place of the marked text."""
        number, position = self.behind(marked), self.position(marked)
        return number < len(self.ids) and self.spans[number][0] < position


class _Piece(NamedTuple):
    """A piece of what is read, and where it stands in the marked text."""

    text: str
    start: int
    end: int
    atom: bool = False  # whether its letters stand for the marked text's together, and not one for one
    separator: bool = False


class _Breaks(NamedTuple):
    """Where a token must end in a marked text."""

    between: dict[int, str]  # before the character at this place, and by which separator
    inside: set[int]  # behind the first letter of the spelling that is hidden there


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
        return self.pattern.search(text) is None and not has_surrogates(text)

    def spells(self, text: str) -> str | None:
        """The first control token of this tokenizer that the text spells."""
        return next((match[0] for match in self.pattern.finditer(text) if match[0] in self._names), None)

    def encode(self, marked: str, marks: Marks, cuts: Collection[int] = ()) -> Tokens:
        """The tokens of a marked text, without any that the tokenizer would add around it. UserError where the
        tokenizer is not of the `tokenizers` library, or cannot write a spelling as text. `cuts`: indices at which a
        token must end. Where none does, the text before it is read as if it ended there."""
        breaks = _Breaks({}, set())
        while True:
            tokens = self._read(marked, marks, breaks)
            between = {position for position in cuts if tokens.over(position)} | tokens.mixed
            inside = self._forged(tokens, marked, marks)
            if not between and not inside:
                return tokens
            if inside & breaks.inside or any(breaks.between.get(position) == _CUT for position in between):
                raise UserError(
                    f"the tokenizer of {self.tokenizer.name_or_path!r} has no text for what spells a control token in "
                    f"{marks.plain(marked)[:60]!r}; leave the example out, or choose another base"
                )
            breaks.inside.update(inside)
            for position in between:
                breaks.between[position] = _CUT if self._cuts_well or position in breaks.between else marks.spare(0)

    def _forged(self, tokens: Tokens, marked: str, marks: Marks) -> set[int]:
        """Where hidden spellings became control tokens all the same: a vocabulary may hold them as words, too."""
        positions = set()
        for hidden in marks.hidden.finditer(marked):
            first, last = tokens.behind(hidden.start()), tokens.behind(hidden.end())
            if not self._control.isdisjoint(tokens.ids[first : last + tokens.over(hidden.end())]):
                positions.add(hidden.start())
        return positions

    def _read(self, marked: str, marks: Marks, breaks: _Breaks) -> Tokens:
        """The tokens, with a separator at each break, which is taken out again."""
        twin, original = self._twin
        parts = _parts(marked, marks, self.pattern, self._names, breaks)
        encoding = twin.encode("".join(part.text for part in parts), add_special_tokens=False)
        ids, spans, mixed = [original.get(id, id) for id in encoding.ids], encoding.offsets, set()
        if breaks.between or breaks.inside:
            ends = list(accumulate(len(part.text) for part in parts))
            gaps = [(part, end - len(part.text), end) for part, end in zip(parts, ends, strict=True) if part.separator]
            kept = []
            for number, (start, end) in enumerate(spans):
                over = [part for part, first, last in gaps if first < end and start < last]
                alone = any(first <= start and end <= last and start < last for _, first, last in gaps)
                mixed |= set() if alone else {part.start for part in over}
                kept += [] if alone else [number]
            ids, spans = [ids[number] for number in kept], [spans[number] for number in kept]
        return Tokens(ids, spans, parts, mixed)

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
        for step in ("normalizer", "pre_tokenizer"):
            if (part := getattr(backend, step)) is not None:
                setattr(twin, step, part)
        added = self.tokenizer.added_tokens_decoder
        names = {id: self._names.get(token.content, token.content) for id, token in added.items()}
        twin.add_tokens(
            [*(_renamed(token, names[id]) for id, token in added.items()), AddedToken(_CUT, normalized=False)]
        )
        return twin, {number: id for id, name in names.items() if (number := twin.token_to_id(name)) is not None}


def _parts(
    marked: str, marks: Marks, pattern: re.Pattern[str], names: Mapping[str, str], breaks: _Breaks
) -> list[_Piece]:
    """A marked text as the copy is to read it: with new names for the template's control tokens, and the spellings of
    the data as they are."""
    atoms = [
        _Piece(names[match[0]], *match.span(), atom=True) for match in pattern.finditer(marked) if match[0] in names
    ]
    for match in marks.hidden.finditer(marked):
        position, text = match.start(), marks.shown(match[0])
        pieces = [text[:1], text[1:]] if position in breaks.inside else [text]
        for number, piece in enumerate(pieces):
            if number:
                atoms.append(_Piece(_CUT, position, position + 1, atom=True, separator=True))
            atoms.append(_Piece(piece, position, position + 1, atom=True))
    atoms += [_Piece(sign, position, position, atom=True, separator=True) for position, sign in breaks.between.items()]
    parts, end = [], 0
    for atom in sorted(atoms, key=lambda part: (part.start, part.end)):  # stable: pieces keep their order
        if atom.start > end:
            parts.append(_Piece(marked[end : atom.start], end, atom.start))
        parts.append(atom)
        end = atom.end
    return [*parts, _Piece(marked[end:], end, len(marked))]


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized and name == token.content,
    )


def control_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, ...]:
    """What a template may write and data may not: special tokens; other added tokens of the form `<|...|>`, or that the
    template's text names, but for tags (`<b>`), which are ordinary text; and the tags of reasoning. White space is
    always ordinary text."""

    def controls(token: AddedToken) -> bool:
        text = token.content
        named = text in template and not _TAG.fullmatch(text)
        return token.special or named or _SHAPE.fullmatch(text) is not None

    added = {token.content for token in tokenizer.added_tokens_decoder.values() if controls(token)}
    return tuple(sorted(text for text in {*added, *tokenizer.all_special_tokens, THINK, THOUGHT} if text.strip()))
