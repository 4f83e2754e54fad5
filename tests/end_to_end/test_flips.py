"""Flipped bits in run folders: named, or without any effect; `tests/support/flips.py` tries thousands."""

from __future__ import annotations

import random

import flips
import pytest


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> flips.Runs:
    return flips.Runs(tmp_path_factory.mktemp("flips"), ("local",))


@pytest.mark.parametrize(
    "command, file, text, named",
    [
        ("eval", "summary.json", b'"rounds"', True),
        ("eval", "config.yaml", b"seed: 0", True),
        ("eval", "adapters/ada/adapter_config.json", b'"lora_alpha": 8', True),
        ("eval", "adapters/ada/adapter_model.safetensors", b"lora_B", True),
        ("eval", "adapters/ada/README.md", b"ada", False),
        ("run", "checkpoints/round-0002/manifest.json", b"memory/ada", False),  # an earlier one is whole
        ("run", "metrics.jsonl", b'"loss": ', True),
        ("run", "timing.jsonl", b"parts", True),
    ],
)
def test_a_flipped_bit_is_named_or_without_effect(runs, command, file, text, named):
    """The last bit of the last letter of a text: still JSON or YAML, but another one."""
    data = (runs.origin("local", command) / file).read_bytes()
    assert runs.check("local", command, file, data.index(text) + len(text) - 1, 0) is named


def test_flipped_bits_anywhere(runs):
    for _, case in zip(range(8), runs.cases(random.Random(5)), strict=False):
        runs.check(*case)
