"""Samples of what the generators try: random adapters of stock PEFT, and merged models of several families.

`make long` tries many more, and lets transformers 4.57 and PEFT 0.18 read what was written."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import every
import merged_models
import pytest
import stock_adapters

SUPPORT = Path(__file__).parents[1] / "support"
# A folder with older libraries, see reader.py.
OLDER = os.environ.get("LLM_FED_OLDER", "")


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
    outcome = merged_models.export(name, family, dict(merged_models.variants(family))[name], tmp_path)
    assert (outcome.flaw, outcome.needs) == ("", "")


@pytest.mark.parametrize("family", ["qwen3_5_text", "laguna"])  # Laguna reads no older keys of rotary embeddings
def test_a_family_that_version_4_lacks(family, tmp_path):
    outcome = merged_models.export("new", family, {}, tmp_path)
    assert not outcome.flaw and outcome.needs.startswith("5.")


@pytest.mark.slow
@pytest.mark.skipif(
    not OLDER, reason="LLM_FED_OLDER names no folder with transformers 4.57 and PEFT 0.18, see reader.py"
)
@pytest.mark.parametrize(
    "words",
    [
        *(("merged_models.py", "--parts", "4", "--part", str(part)) for part in range(1, 5)),
        ("stock_adapters.py", "--cases", "1000"),
    ],
    ids="-".join,
)
def test_what_older_libraries_read(words):
    script, *more = words
    subprocess.run(
        [sys.executable, SUPPORT / script, *more, "--older", OLDER], check=True,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
    )  # fmt: skip
