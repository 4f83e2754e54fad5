"""Checksums within files: of values, whatever their order, and of texts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_fed.basics import checksum

VALUES = {"round": 3, "scores": {"ada": 1.5, "bob": None}, "clients": ["ada", "ü"], "2": [True, float("inf")]}


@given(position=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_or_changes_nothing(position, bit):
    data = bytearray(json.dumps(checksum.added(VALUES), indent=1, ensure_ascii=False).encode())
    data[position % len(data)] ^= 1 << bit
    try:
        found = checksum.checked(json.loads(data))
    except ValueError:
        return
    found.pop(next(iter(found.keys() - VALUES.keys()), ""), None)  # the name of the checksum itself was hit
    assert found == VALUES


def test_the_order_of_keys_and_what_has_none():
    told = checksum.added(VALUES)
    assert checksum.checked(dict(reversed(told.items()))) == VALUES == checksum.checked(VALUES)
    with pytest.raises(checksum.ChecksumError, match="does not match"):
        checksum.checked({**told, "round": 4})
    with pytest.raises(checksum.ChecksumError, match="not a JSON object"):
        checksum.checked([told])


def test_a_text():
    lines = "seed: 0\nrounds: 3\n"
    text = checksum.commented(lines)
    assert checksum.uncommented(text) == checksum.uncommented(lines) == lines
    with pytest.raises(checksum.ChecksumError, match="delete that line"):
        checksum.uncommented(text.replace("3", "4"))
