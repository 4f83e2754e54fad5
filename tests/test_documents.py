"""YAML and JSON that may be a stranger's: what is written is read again, and what is no document, or makes much of
little, is refused at once."""

import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_fed.basics import documents
from llm_fed.basics.errors import UserError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
SCALARS |= st.sampled_from(["1e5", "2024-01-01", "no", "=", "<<", "0x1f", "1:30", "{a}", "~"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text("ab: #-?'\né漢", max_size=9), inner)
)


@settings(max_examples=60)
@given(VALUES, st.booleans())
def test_what_is_written_is_read_again(values, unicode):
    text = documents.dump(values, unicode=unicode)
    assert documents.load(text) == yaml.safe_load(text) == values


def test_keys_keep_their_order():
    assert documents.dump({"b": 1, "a": 2}) == "b: 1\na: 2\n"


def test_a_value_keeps_its_text():
    read = documents.read("a: [1e5, no]\nb: &x 1e5\nc: *x\n")
    assert [documents.text_of(read[key]) for key in "bc"] == ["1e5", "1e5"]
    assert list(map(documents.text_of, read["a"])) == ["1e5", "no"] and documents.plain(read["a"]) == [1e5, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((mark * 100_000, ".") for mark in ("[", "{a: ", "- ", "? ")),
        ("a: [", "line [12]: "),
        ("!!python/name:os.system", "no meaning here"),
        ("a: !x", "the tag !x has no meaning here"),
        ("a: 1\nb: {c: 1, c: 2}", "line 2: the key c is there twice"),
        ("&a [*a]", "an alias stands within what it names"),
        ("a: &a {<<: *a}", "an alias stands within what it names"),
        ("<<: 5", "<< takes mappings"),
        ("? [a]\n: 1", "a key is a list"),
        ("9" * 500, "more than 400 characters"),
        (":".join(["1"] * 100_000), "more than 400 characters"),
        ("a" * (documents.LONGEST + 1), "characters long"),
    ],
)
def test_what_cannot_be_read_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        documents.load(text)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_aliases_that_make_much_of_little_are_refused_at_once(data):
    """Lists and mappings of any shape in which each level names the one before several times, below any key."""
    width, depth = data.draw(st.integers(2, 30)), data.draw(st.integers(1, 30))
    first = data.draw(st.sampled_from(["[x, x]", "{k: x}", "some text", "[[], {}]"]))
    lines, makes = [f"n0: &n0 {first}"], 1
    for level in range(1, depth + 1):
        names = [f"*n{level - 1}"] * width
        kinds = ["[{}]".format(", ".join(names)), "{{{}}}".format(", ".join(f"k{n}: {x}" for n, x in enumerate(names)))]
        lines.append(f"n{level}: &n{level} {data.draw(st.sampled_from(kinds))}")
        makes *= width
    start = time.process_time()
    if makes > documents.REPEATED:
        with pytest.raises(UserError, match="aliases repeat more than"):
            documents.load("\n".join(lines))
    elif makes * 30 < documents.REPEATED:
        assert documents.load("\n".join(lines))["n0"] == documents.load(first)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a": 1, "a": 2}', "{", "", b"\xff"])
def test_json_that_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        documents.load_json(text)
