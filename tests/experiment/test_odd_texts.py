"""One set of odd texts through every kind of base and of row: what data spell like a control token is text in each, and
each says in how many examples that is so."""

from dataclasses import replace
from typing import Any

import classifiers
import odd_tokenizers
import pytest
from tokenizers import processors

from llm_fed.kinds.encoding import Encoder
from llm_fed.kinds.sentences import SentenceEncoding
from llm_fed.kinds.sequences import Sequences, load_sequences
from llm_fed.method.site import Data
from llm_fed.settings.config import NUMBER, Config, TaskConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.tasks.common import ClientData, Example, TaskData, Turn

PLAIN = "the Bay 4."
AROUND = ("{}", " {}", "{}{}", "the {} Bay", "Bay{}\n", "\ud800{}", "<think>{}", "é🙂{}\u2028")
TOKENIZERS = odd_tokenizers.tokenizers()
CONFIG = from_dict({"task": {"max_length": 500}})


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Sequences]:
    folder = classifiers.written(tmp_path_factory.mktemp("base") / "bert", "bert", max_position_embeddings=500)
    config, labels = from_dict({"base": {"name": str(folder)}}), {"labels": ("no", "yes"), "numbers": (NUMBER,)}
    return {kind: load_sequences(config, TaskData("", "", {}, names), "cpu") for kind, names in labels.items()}


@pytest.fixture(autouse=True)
def _embeddings_for_all(monkeypatch):
    monkeypatch.setattr(Sequences, "rows", 10_000)


def odd(tokenizer: Any) -> list[str]:
    return [around.replace("{}", text) for text in tokenizer.all_special_tokens for around in AROUND]


def written(kind: str, text: str) -> Example:
    if kind == "preferences":
        rejected = (Turn("user", text), Turn("assistant", f"Bay {text}"))
        return Example(text, (text,), rejected=rejected)
    return Example(text, (text,)) if kind == "language" else Example(text, ("1",), pair=text)


def read(kind: str, tokenizer: Any, bases: dict[str, Sequences], texts: list[str]) -> tuple[list[Any], str]:
    """Of each text the tokens of its example, and what is said of all."""
    examples = tuple(written(kind, text) for text in texts)
    if kind in bases:
        base = replace(bases[kind], tokenizer=tokenizer)
        encoding = SentenceEncoding(base, CONFIG, ())
        data = encoding.data("ann", ClientData("ann", train=examples), Data())
        return [[each.input_ids] for each in data.train]
    objective = ObjectiveConfig("dpo" if kind == "preferences" else "sft")
    encoder = Encoder(tokenizer, Config(task=TaskConfig(max_length=500), objective=objective))
    made = encoder.training("ann", "training", examples)
    pairs = [each.texts if kind == "preferences" else (each,) for each in made]
    return [[text.input_ids for text in texts] for texts in pairs]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", ["language", "preferences", "labels", "numbers"])
def test_text_is_text_in_every_kind(kind, name, bases):
    """No row has more control tokens than one whose text spells none."""
    tokenizer, _ = TOKENIZERS[name]
    control = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    texts = odd(tokenizer)
    found = read(kind, tokenizer, bases, [PLAIN, *texts])
    counts = [[sum(id in control for id in ids) for ids in rows] for rows in found]
    assert len(found) == len(texts) + 1
    assert {text: count for text, count in zip(texts, counts[1:], strict=True) if count != counts[0]} == {}


@pytest.mark.parametrize("pair", [False, True], ids=["one text", "two texts"])
@pytest.mark.parametrize("name", ["bytes", "bytes with BOS", "gemma"])
def test_a_classifier_reads_a_spelling_as_tokenizers_does_when_it_is_asked_to(name, pair, bases):
    """With `split_special_tokens`, where no control token is a word of the vocabulary, too."""
    tokenizer, _ = TOKENIZERS[name]
    begin = tokenizer.all_special_tokens[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B:1", special_tokens=[(begin, tokenizer.all_special_ids[0])]
    )
    base = replace(bases["labels"], tokenizer=tokenizer)
    texts = [text for text in odd(tokenizer) if "\ud800" not in text and "<think>" not in text]
    made = base.classified([(text, f"{text}a") for text in texts] if pair else texts)
    beside = {"text_pair": [f"{text}a" for text in texts]} if pair else {}
    assert [each.input_ids for each in made] == tokenizer(texts, **beside, split_special_tokens=True).input_ids
