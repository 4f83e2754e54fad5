"""Texts in a batch are what they are alone, in families with a head."""

import classifiers_alone
import pytest
from classifiers_alone import FAMILIES, examined

from llm_fed.kinds import sequences
from llm_fed.models.architectures import FELT


@pytest.mark.parametrize("family", ["albert", "electra", "mpnet", "deberta", "gemma2", "qwen3"])
def test_a_family_is_equal(family):
    assert examined(family) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_differs(family):
    assert not examined(family).startswith("differs")


@pytest.mark.parametrize("family", FELT)
def test_families_that_feel_padding_are_refused(family):
    assert family in FAMILIES and examined(family).startswith("refused")


@pytest.mark.parametrize("family", ["convbert", "mobilebert"])
def test_the_generator_finds_them(family, monkeypatch):
    monkeypatch.setattr(sequences, "FELT", {})
    assert classifiers_alone.examined(family).startswith("differs")


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_are_refused(family):
    assert "an encoder-decoder, whose two halves read the text" in examined(family)
