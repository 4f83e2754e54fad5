"""Saved configurations are read and written by libyaml: the values are those of PyYAML's own reader and writer."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_fed.basics import plain_yaml

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text("ab: #-?'\né漢", max_size=9), inner)
)


@settings(max_examples=40)
@given(VALUES)
def test_either_reads_what_the_other_wrote(values):
    own, theirs = plain_yaml.dump(values), yaml.safe_dump(values, sort_keys=False)
    for read in (plain_yaml.load, yaml.safe_load):
        assert read(own) == read(theirs) == values


def test_keys_keep_their_order():
    assert plain_yaml.dump({"b": 1, "a": 2}) == "b: 1\na: 2\n"


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "a: [", "!!python/name:os.system"])
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises((yaml.YAMLError, RecursionError)):
        plain_yaml.load(text)
