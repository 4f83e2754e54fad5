"""Rows of a batch are what they are alone: a seeded sample of all families of transformers and their variants."""

import random

import every
import every_family
import pytest
import rows_alone
import torch

from llm_fed.engine import continuous
from llm_fed.models import families
from llm_fed.testing.tiny import language_base

SAMPLE = random.Random(0).sample(sorted(set(every_family.FAMILIES) & families.PADDED), 2)


def examined(family: str, variant: str) -> rows_alone.Found:
    return rows_alone.examine(family, every_family.variants(family)[variant])


@pytest.mark.parametrize("family", SAMPLE)
def test_one_variant_of_a_family(family):
    known = every_family.variants(family)
    variant = random.Random(family).choice(sorted(known))
    found = examined(family, variant)
    assert not found.wrong
    assert found.verdict == "equal" or (variant != "as it is" and found.verdict == "not made")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", every_family.FAMILIES)
def test_every_variant_of_every_family(family):
    try:
        known = every_family.variants(family)
    except Exception as error:
        pytest.skip(f"transformers cannot make it so small: {error}")
    found = {variant: rows_alone.examine(family, changes) for variant, changes in known.items()}
    assert not any(each.wrong for each in found.values()), found
    print({variant: each.verdict for variant, each in found.items()})


FELT = [
    ("mamba", "as it is"),  # padding reaches its state
    ("mpt", "as it is"),  # padding behind a shared beginning would count as distance
    ("bart", "as it is"),  # it counts padding as positions
    ("rembert", "decoder"),  # its cache has one for an encoder, too
]


@pytest.mark.parametrize(("family", "variant"), FELT)
def test_families_that_were_once_felt(family, variant):
    found = examined(family, variant)
    assert found.verdict == "equal", found


STATES = ["mamba", "falcon_mamba", "mamba2", "jamba", "falcon_h1", "qwen3_next", "zamba2", "granitemoehybrid", "lfm2"]


@pytest.mark.parametrize("family", every.quick(STATES, STATES[:3]))
def test_token_by_token_a_text_is_read_as_it_is_at_once(family):
    """What a base keeps of a text are states, or keys, or both."""
    model = every_family.build(family)
    base = language_base(model)
    text, first = torch.tensor([rows_alone.words(20, 3)]), 9
    cache, begun = None, 0
    with torch.no_grad():
        for end in range(first, 20):
            mask = torch.ones(1, end, dtype=torch.int64)
            logits, cache = continuous.forward(base, text[:, begun:end], mask, cache, keep=1, padded=False)
            expected = model(input_ids=text[:, :end], use_cache=False).logits[:, -1:]
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)  # some keep states in float32
            begun = end


@pytest.mark.parametrize("family", ["doge", "bert", "xlm"])
def test_families_whose_rows_cannot_be_told_apart(family, monkeypatch):
    """They are refused; and the generator finds why, if they are not."""
    assert "cannot be a base" in examined(family, "as it is").refused
    monkeypatch.setattr(rows_alone, "check_family", lambda config, name: None)
    assert "sees_no_future" in examined(family, "as it is").wrong
