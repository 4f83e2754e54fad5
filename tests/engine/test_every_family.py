"""Rows of a batch are what they are alone: a seeded sample of all families of transformers and their variants, of which
`tests/support/rows_alone.py` tries every one (`make long`)."""

from __future__ import annotations

import random

import every
import every_family
import pytest
import rows_alone

from llm_fed.models import families

SAMPLE = random.Random(0).sample(sorted(set(every_family.FAMILIES) & families.PADDED), 2)


def examined(family: str, variant: str) -> rows_alone.Found:
    return rows_alone.examine(family, variant, every_family.variants(family)[variant])


@pytest.mark.parametrize("family", SAMPLE)
def test_one_variant_of_a_family(family):
    known = every_family.variants(family)
    variant = random.Random(family).choice(sorted(known))
    found = examined(family, variant)
    assert not found.wrong
    assert found.verdict == "equal" or (variant != "as it is" and found.verdict == "not made")


FELT = [
    ("mamba", "as it is"),  # padding reaches its state
    ("mpt", "as it is"),  # padding behind a shared beginning would count as distance
    ("bart", "as it is"),  # it counts padding as positions
    ("phi3", "longrope"),  # these two are in test_rotary.py, too
    ("qwen3", "dynamic"),
]


@pytest.mark.parametrize(("family", "variant"), every.quick(FELT, FELT[:3]))
def test_families_that_were_once_felt(family, variant):
    found = examined(family, variant)
    assert found.verdict == "equal", found


@pytest.mark.parametrize("family", ["doge", "bert", "xlm"])
def test_families_whose_rows_cannot_be_told_apart(family, monkeypatch):
    """They are refused; and the generator finds why, if they are not."""
    assert "cannot be a base" in examined(family, "as it is").refused
    monkeypatch.setattr(rows_alone, "check_family", lambda config, name: None)
    assert "sees_no_future" in examined(family, "as it is").wrong
