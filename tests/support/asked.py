"""What training and evaluation make of one example: a conversation, a single question, options, calls of tools, or a
text without a prompt."""

import random
import unicodedata
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerFast

from llm_fed.engine.generation import answer_text
from llm_fed.kinds.encoding import Encoder
from llm_fed.method.requests import Query
from llm_fed.scoring.metrics import normalise
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import Encoded, Example, Template
from llm_fed.tasks.control import answer_of, reasoning, without_surrogates
from llm_fed.tasks.templates import around, encode_continuation, encoded, filled

TOOLS = ("bytes, with tools", "bytes with BOS, with tools")  # whose templates write calls


def check_asked(tokenizer: PreTrainedTokenizerFast, template: Template, example: Example, lossless: bool) -> Query:
    """Lengths are those of the tokens, evaluation asks what training trains, each option is as it would be trained, and
    a model that writes the target has answered rightly.

    Args:
        lossless: whether the tokenizer writes every text.
    """
    made = Encoder(tokenizer, TaskConfig(max_length=10**6), template)
    (length,) = made.lengths([example])
    (trained,), (query,) = made.training("c", "training", [example]), made.queries("c", "test", [example])
    assert (length.prompt, length.whole) == (len(query.prompt), len(trained.input_ids)), "not as long as was said"
    assert query.example == trained, "evaluation has other tokens than training"
    if example.prompt:
        assert query.prompt == trained.requested, "evaluation asks for another prompt than training"
    for option, ids in zip(dict.fromkeys(example.options), query.options, strict=True):
        alone = encode_continuation(example.prompt, option, tokenizer, template=template)
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
