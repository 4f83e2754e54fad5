"""Samples of what the generators try: random adapters of stock PEFT, and merged models of several families. Slow tests
try many more, and let transformers 4.57 and PEFT 0.18 read what was written."""

import contextlib
import os
import random
from collections import Counter
from pathlib import Path

import every
import every_family
import merged_models
import pytest
import stock_adapters
from reader import read_by


@pytest.mark.filterwarnings("ignore")  # of PEFT, at odd configurations
def test_random_adapters_of_stock_peft(tmp_path):
    adapters = stock_adapters.Adapters(tmp_path)
    outcomes = Counter(adapters.try_one(random.Random(f"test-{number}")) for number in range(12))
    assert outcomes["equal"] > 6 and outcomes["refused"] > 0, outcomes


@pytest.mark.parametrize(
    "name", every.quick(["gemma3_text", "phi3-longrope", "gpt_neox-tied", "mixtral"], ["gpt_neox-tied", "mixtral"])
)
def test_families_that_are_merged(name, tmp_path):
    family = name.partition("-")[0]
    outcome = merged_models.export(name, family, merged_models.variants(family)[name], tmp_path)
    assert (outcome.flaw, outcome.needs) == ("", "")


@pytest.mark.parametrize("family", ["qwen3_5_text", "laguna"])  # Laguna reads no older keys of rotary embeddings
def test_a_family_that_version_4_lacks(family, tmp_path):
    outcome = merged_models.export("new", family, {}, tmp_path)
    assert not outcome.flaw and outcome.needs.startswith("5.")


@pytest.fixture
def libraries() -> Path:
    """A folder with older libraries, see reader.py."""
    if not (folder := os.environ.get("LLM_FED_OLDER")):
        pytest.skip("LLM_FED_OLDER names no folder with transformers 4.57 and PEFT 0.18, see reader.py")
    return Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_merged_models_that_older_libraries_read(libraries, tmp_path, part):
    made: list[merged_models.Outcome] = []
    for family in every_family.FAMILIES[part::4]:
        with contextlib.suppress(Exception):  # it cannot be made so small
            for name, changes in merged_models.variants(family).items():
                made.append(merged_models.export(name, family, changes, tmp_path))
    readable = [each for each in made if not (each.flaw or each.needs or each.refused)]
    merged_models.read_elsewhere(readable, libraries, tmp_path)
    assert len(readable) > 20 and not [each for each in made if each.flaw]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_that_older_libraries_read(libraries, tmp_path):
    adapters = stock_adapters.Adapters(tmp_path)
    every.passes(range(1000), lambda number: adapters.try_one(random.Random(number)))
    said = read_by(libraries, adapters.written, tmp_path)
    assert all(one.get("apart", 1.0) < stock_adapters.NEAR for one in said), said
