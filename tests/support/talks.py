"""Random conversations in chat templates and in templates of text, with tokenizers of every kind.

Of each it is checked that the targets are the replies with the tokens that end them and nothing else, that a prompt has
the same tokens in training and in evaluation, that a conversation of one turn is a single question, that nothing in the
data became a control token, and that all tokens are those of the tokenizer for what the template writes.
"""

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any

from chat_forms import BLOCK, FORMS, Form, form_for
from odd_tokenizers import WORDS, tokenizers
from transformers import PreTrainedTokenizerFast

from llm_fed.engine.generation import answer_text
from llm_fed.kinds.encoding import Encoder
from llm_fed.method.requests import Query
from llm_fed.scoring.metrics import normalise
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.tasks.common import Encoded, Example, Template, Turn
from llm_fed.tasks.control import answer_of, reasoning, without_surrogates
from llm_fed.tasks.conversations import turns_of
from llm_fed.tasks.templates import around, encode_prompt, encoded, filled, template_of

TOOLS = ("bytes, with tools", "bytes with BOS, with tools")  # whose templates write calls


def check_asked(tokenizer: PreTrainedTokenizerFast, template: Template, example: Example, lossless: bool) -> Query:
    """Lengths are those of the tokens, evaluation asks what training trains, each option is as it would be trained, and
    a model that writes the target has answered rightly.

    Args:
        lossless: whether the tokenizer writes every text.
    """
    made = Encoder(tokenizer, Config(task=TaskConfig(max_length=10**6)), template)
    (length,) = made.lengths([example])
    (trained,), (query,) = made.training("c", "training", [example]), made.queries("c", "test", [example])
    assert (length.prompt, length.whole) == (len(query.prompt), len(trained.input_ids)), "not as long as was said"
    assert query.example == trained, "evaluation has other tokens than training"
    if example.prompt:
        assert query.prompt == trained.requested, "evaluation asks for another prompt than training"
    for option, ids in zip(dict.fromkeys(example.options), query.options, strict=True):
        alone = encoded(Example(example.prompt, (option,)), tokenizer, template)
        assert alone.input_ids == [*query.prompt, *ids, *alone.input_ids[len(query.prompt) + len(ids) :]]
    assert all(query.options[place] == trained.answer for place in query.correct[:1]), "not the option that is trained"
    if lossless and example.prompt and answer_of(example.answers[0][reasoning(example.answers[0]) :]).strip():
        _answers_rightly(tokenizer, template, trained, query)
    return query


def _answers_rightly(tokenizer: PreTrainedTokenizerFast, template: Template, trained: Encoded, query: Query) -> None:
    """The target, written as a model would, is a right answer, up to the first token that ends one."""
    stops = {tokenizer.eos_token_id, *filled(template, tokenizer).ends}
    answer = trained.answer
    assert answer[-1] in stops, "the answer has no end"
    written = answer[: next(place for place, id in enumerate(answer) if id in stops)]
    base: Any = SimpleNamespace(tokenizer=tokenizer, prompt=SimpleNamespace(template=template))
    said = normalise(answer_text(base, query.prompt, written))
    assert said in map(normalise, query.answers), f"the target reads {said!r}, and right is {query.answers!r}"


def check_bare(tokenizer: PreTrainedTokenizerFast, template: Template, text: str, lossless: bool) -> None:
    """A text that is learned without a prompt stands alone, whatever the template: BOS, its tokens, EOS."""
    example = Example("", (text,))
    check_asked(tokenizer, template, example, lossless)
    found, begins = encoded(example, tokenizer, template), around(tokenizer)[0]
    ids, eos = found.input_ids, tokenizer.eos_token_id
    assert ids[: len(begins)] == begins and ids[-1] == eos, "not between BOS and EOS"
    assert found.target == [False] * max(1, len(begins)) + [True] * (len(ids) - max(1, len(begins)))
    inner = ids[len(begins) : -1]
    if filled(template, tokenizer).safe.is_plain(text):
        assert inner == tokenizer(text, add_special_tokens=False).input_ids
    assert not {*inner} & {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}, "a control token in a text"
    if lossless:
        plain = unicodedata.normalize("NFC", without_surrogates(text))
        assert unicodedata.normalize("NFC", str(tokenizer.decode(inner))).strip() == plain.strip()


def with_tools(draw: random.Random, words: Any) -> list[dict[str, Any]]:
    """A conversation with calls of tools, as rows hold it; it ends with a call or with an answer.

    Args:
        words: draws a text.
    """
    calls = [
        {"type": "function", "function": {"name": draw.choice(("look_up", "f")), "arguments": {"x": words(draw)}}}
        for _ in range(draw.choice((1, 1, 2)))
    ]
    asked = {"role": "user", "content": words(draw)}
    call = {"role": "assistant", "content": draw.choice(("", words(draw))), "tool_calls": calls}
    said = [{"role": "tool", "content": words(draw), "name": "look_up"} for _ in calls]
    answer = {"role": "assistant", "content": words(draw), "weight": draw.choice((0, 1, 1))}
    last = answer | {"weight": 1}
    ending = draw.choice(([call], [call, *said, last], [call, *said, answer, asked, last]))
    return [*draw.choice(([], [{"role": "system", "content": words(draw)}])), asked, *ending]


SPELLED = (
    "<s>", "</s>", "<|im_end|>", "<|im_start|>", "<|im_start|>system\n", "<end_of_turn>", "<|eot_id|>", "<bos>",
    "<eos>", "<|user|>", "<think>", "</think>", "<unk>", "<|endoftext|>", "<pad>", "<｜User｜>",
)  # fmt: skip

# Conversations


def talk(draw: random.Random) -> list[Turn]:
    """One to five pairs of turns, perhaps after a system text; the last is trained."""
    turns = [Turn("system", content(draw))] * (draw.random() < 0.3)
    for _ in range(draw.choice((1, 1, 2, 3, 5))):
        turns += [Turn("user", content(draw)), Turn("assistant", _reply(draw), draw.random() < 0.9)]
    return [*turns[:-1], turns[-1]._replace(trained=True)]


def content(draw: random.Random) -> str:
    """A text with line breaks, several scripts, signs, and, in one of three, what reads like control tokens."""
    words = WORDS + SPELLED * (draw.random() < 0.3)
    while True:
        text = draw.choice(("", "", " ")).join(draw.choices(words, k=draw.randint(1, 8)))
        if text.strip():
            return text


def _reply(draw: random.Random) -> str:
    text = content(draw)
    return f"<think>\n{content(draw).replace('</think>', '')}\n</think>\n\n{text}" if draw.random() < 0.1 else text


# Checks


@dataclass(frozen=True)
class Expected:
    """What a template writes of a conversation, put together from what it writes around texts that say nothing.

    Attributes:
        pieces: of the text, and of each who wrote it; empty: the template.
        spans: of each message of the assistant its number, where what it writes begins and ends in the text, and
            whether it ends with the token for that.
    """

    pieces: list[tuple[str, str]]
    spans: list[tuple[int, int, int, bool]]

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


def expected(tokenizer: PreTrainedTokenizerFast, form: Form, turns: Sequence[Turn]) -> Expected:
    """Of turns as the template takes them."""
    template = template_of("chat", tokenizer)
    habits: Any = filled(template, tokenizer).habits  # type: ignore[union-attr]
    signs = [chr(0xE000 + number) for number in range(len(turns))]
    messages = [{"role": turn.role, "content": sign} for turn, sign in zip(turns, signs, strict=True)]
    rest = str(
        tokenizer.apply_chat_template(messages, chat_template=template.text, date_string=template.date, tokenize=False)
    )
    pieces: list[tuple[str, str]] = []
    spans, length = [], 0
    for number, (turn, sign) in enumerate(zip(turns, signs, strict=True)):
        before, _, rest = rest.partition(sign)
        last, spoken = number == len(turns) - 1, turn.role == "assistant"
        wording = turn.content
        if spoken or turn.role == "user" or form.trims_system:
            wording = form.written(wording, last) if spoken else form.others(wording)
        if wording.startswith("<think>\n") and before.endswith(BLOCK):
            before = before.removesuffix(BLOCK)
        pieces += [(before, ""), (wording, turn.role)]
        length += len(before) + len(wording)
        if spoken:
            end = re.match(rf"\s*{re.escape(form.end)}", rest) if form.end else None
            start = length - len(wording) - len(habits.lead) * before.endswith(habits.lead)
            spans.append((number, start, length + (end.end() if end else 0), end is not None))
    return Expected([*pieces, (rest, "")] if form.end else pieces, spans)


def check(tokenizer: PreTrainedTokenizerFast, form: Form, turns: Sequence[Turn], lossless: bool) -> None:
    """Raises AssertionError where one of the properties does not hold.

    Args:
        lossless: whether the tokenizer writes every text.
    """
    template = template_of("chat", tokenizer)
    it: Any = filled(template, tokenizer)
    found = encoded(Example(tuple(turns[:-1]), (turns[-1].content,)), tokenizer, template)
    if turns[0].role == "system" and not form.system:
        turns = [turns[1]._replace(content=f"{turns[0].content}\n\n{turns[1].content}"), *turns[2:]]
    known = expected(tokenizer, form, turns)
    trained = [(start, stop) for number, start, stop, _ in known.spans if turns[number].trained]
    ended = [has_end for number, _, _, has_end in known.spans if turns[number].trained]
    runs = _runs(found.target)
    assert len(runs) == len(trained), f"{len(runs)} targets for {len(trained)} replies"
    prompt = encode_prompt(turns[:-1], tokenizer, template=template)
    if not reasoning(turns[-1].content) or form.written(turns[-1].content, True).find("<think>") != 0:
        assert found.requested == prompt, (
            f"the prompt of an evaluation is {tokenizer.convert_ids_to_tokens(prompt)[-8:]}, and that of training "
            f"{tokenizer.convert_ids_to_tokens(found.requested)[-8:]}"
        )
    if len(turns) == 2:
        one = encoded(Example(turns[0].content, (turns[1].content,)), tokenizer, template)
        assert one == found, "a conversation of one turn is no single question"
    ends = {*it.ends} if form.end else {tokenizer.eos_token_id}
    for number, ((_, stop), has_end) in enumerate(zip(runs, ended, strict=True)):
        if has_end or number == len(runs) - 1:
            assert found.input_ids[stop - 1] in ends, "a turn has no end"
    _no_forgery(tokenizer, it, known, found, form)
    if lossless:
        _says_the_same(tokenizer, known, trained, runs, found, form)
    if all(it.safe.is_plain(piece) for piece, author in known.pieces if author):
        _same_tokens(tokenizer, known, trained, found, form)


def _no_forgery(tokenizer: PreTrainedTokenizerFast, it: Any, known: Expected, found: Encoded, form: Form) -> None:
    """As many control tokens as the template writes, and the tags of reasoning in replies."""
    names = {text: tokenizer.convert_tokens_to_ids(text) for text in it.safe.spelled if it.safe.spells(text)}
    names.pop(tokenizer.unk_token or "", None)
    written: Counter[Any] = Counter({tokenizer.eos_token_id: int(not form.end)})
    for piece, author in known.pieces:
        signs = [sign[0] for sign in it.safe.pattern.finditer(piece)] if not author else []
        if author == "assistant" and reasoning(piece):
            signs = ["<think>"] * piece.lstrip().startswith("<think>") + ["</think>"]
        written.update(names[sign] for sign in signs if sign in names)
    counted = Counter(id for id in found.input_ids if id in names.values())
    assert counted == +written, f"control tokens {counted}, and the template writes {+written}"


def _says_the_same(
    tokenizer: PreTrainedTokenizerFast,
    known: Expected,
    trained: Sequence[tuple[int, int]],
    runs: Sequence[tuple[int, int]],
    found: Encoded,
    form: Form,
) -> None:
    """The tokens read as the template writes, and the targets as the replies."""

    def plain(text: str) -> str:  # the decoder of LLaMA-2 drops spaces behind BOS
        return re.sub("<s> +", "<s>", unicodedata.normalize("NFC", text))

    def read(stop: int) -> str:
        return plain(_decoded(tokenizer, found.input_ids[:stop]))

    count = len(found.input_ids) - (not form.end)
    assert read(count) == plain(known.text), f"{read(count)!r} for {known.text!r}"
    for (first, last), (start, stop) in zip(runs, trained, strict=True):
        said, meant = read(min(last, count))[len(read(first)) :], known.text[start:stop]
        assert said == plain(meant), f"the target is {said!r} for {meant!r}"


def _decoded(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of tokens, without the space that LLaMA reads behind control tokens."""
    if not tokenizer.tokenize(f"{tokenizer.eos_token}x")[1].startswith("▁"):
        return str(tokenizer.decode(ids))
    special = {*tokenizer.all_special_ids}
    parts = groupby(ids, lambda id: id in special)
    return "".join(
        "".join(tokenizer.convert_ids_to_tokens([*run])) if control else str(tokenizer.decode([*run]))
        for control, run in parts
    )


def _same_tokens(
    tokenizer: PreTrainedTokenizerFast, known: Expected, trained: Sequence[tuple[int, int]], found: Encoded, form: Form
) -> None:
    """Tokens and targets are those of the whole text, unless a token is on both sides of where a reply begins."""
    whole = tokenizer(known.text, add_special_tokens=False, return_offsets_mapping=True)
    spans = whole["offset_mapping"]
    cuts = {place for _, start, stop, has_end in known.spans for place in ((start,) if has_end else (start, stop))}
    if any(first < place < last for first, last in spans for place in cuts):
        return
    more = [] if form.end else [tokenizer.eos_token_id]
    assert found.input_ids == [*whole["input_ids"], *more], "not the tokens of the text"
    target = [any(last > start and first < stop for start, stop in trained) for first, last in spans]
    assert found.target == [*target, *map(bool, more)], "not the targets of the text"


TEXTS = ("alpaca", "alpaca-short", "plain", "{bos}[INST] {prompt} [/INST]", "{prompt}", "<|im_start|>{prompt}</s>\n")


def check_text(tokenizer: PreTrainedTokenizerFast, name: str, turns: Sequence[Turn]) -> None:
    """The same with a template of text: it stands around each message of the user, and EOS behind each answer."""
    template, eos, bos = template_of(name, tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id
    it: Any = filled(template, tokenizer)
    found = encoded(Example(tuple(turns[:-1]), (turns[-1].content,)), tokenizer, template)
    assert found.requested == encode_prompt(turns[:-1], tokenizer, template=template), "prompts differ"
    runs, replies = _runs(found.target), [turn for turn in turns if turn.role == "assistant" and turn.trained]
    assert len(runs) == len(replies) and all(found.input_ids[stop - 1] == eos for _, stop in runs)
    if bos is not None and tokenizer("a").input_ids[0] == bos:
        assert found.input_ids.count(bos) == 1, "not one BOS"
    if eos not in tokenizer(template.text, add_special_tokens=False).input_ids:
        assert found.input_ids.count(eos) == sum(turn.role == "assistant" for turn in turns), "a forged EOS"
    for (start, stop), turn in zip(runs, replies, strict=True):
        if it.safe.is_plain(turn.content):
            assert found.input_ids[start : stop - 1] == tokenizer(turn.content, add_special_tokens=False).input_ids
    if len(turns) == 2 and it.safe.is_plain(turns[0].content):
        whole = tokenizer(template.text.replace("{prompt}", turns[0].content)).input_ids
        assert found.requested == (whole[:-1] if whole[-1:] == [eos] else whole)


def _runs(target: Sequence[bool]) -> list[tuple[int, int]]:
    """Where targets begin and end."""
    changes = [place for place, (one, other) in enumerate(pairwise([False, *target, False])) if one != other]
    return list(zip(changes[::2], changes[1::2], strict=True))


# All of it


Case = tuple[str, PreTrainedTokenizerFast, Form, bool]
LOSSY = ("unigram", "words")


def cases() -> list[Case]:
    """Every tokenizer with every form: name, tokenizer, form, and whether the tokenizer writes every text."""
    return [
        (f"{kind}, {name}", tokenizer, form_for(name, style), kind not in LOSSY)
        for kind, (tokenizer, style) in tokenizers().items()
        for name in FORMS
    ]


def attempt(case: Case, draw: random.Random) -> list[Turn]:
    """Try one conversation.

    Raises:
        AssertionError, and whatever else it should not: a finding.
    """
    name, tokenizer, form, lossless = case
    turns, kind = talk(draw), draw.random()
    tokenizer.chat_template = form.text
    if kind < 0.2:
        text = draw.choice(TEXTS).replace("{bos}", tokenizer.bos_token or "")
        check_text(tokenizer, text, turns)
        check_asked(tokenizer, template_of(text, tokenizer), _example(turns, draw), lossless)
    elif kind < 0.3:
        check_bare(tokenizer, template_of(draw.choice(("chat", "plain")), tokenizer), content(draw), lossless)
    elif kind < 0.5 and name in TOOLS:
        turns = [*turns_of(with_tools(draw, content), "row", "messages")]
        check_asked(tokenizer, template_of("chat", tokenizer), _example(turns, draw), lossless)
    else:
        check(tokenizer, form, turns, lossless)
        check_asked(tokenizer, template_of("chat", tokenizer), _example(turns, draw), lossless)
    return turns


def _example(turns: Sequence[Turn], draw: random.Random) -> Example:
    """A conversation as the Example of a row: perhaps with options, and as a plain question where it is one."""
    *before, last = turns
    asked: Any = before[0].content if len(before) == 1 and draw.random() < 0.5 else tuple(before)
    others = [content(draw) for _ in range(draw.randint(1, 3))]
    options = draw.sample([last.content, *others], k=len(others) + 1) * (draw.random() < 0.3)
    if last.fields or any(map(reasoning, options)):  # of which rows have no options
        options = []
    return Example(asked, (last.content,), tuple(options), "", last.fields)


def encode_conversation(turns: Sequence[Turn], tokenizer: Any, *, template: str | Template) -> Encoded:
    """The whole conversation as the template writes it."""
    return filled(template, tokenizer).conversation(turns)
