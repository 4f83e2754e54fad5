"""The largest length that `init` proposes: no single row sets it, and whoever loses rows by it is named."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_fed.commands.survey import FAR_OF_FEW, LengthLimits, limits, usual_length
from llm_fed.settings import configfile


def limited(context: int, *wholes: int, **clients: list[int]) -> LengthLimits:
    own = {"a": [*wholes]} | clients
    return limits({name: [(whole, whole // 2) for whole in its] for name, its in own.items()}, context)


def test_room_for_the_longest_that_is_not_far_out():
    assert usual_length([10] * 99 + [15]) == 15
    assert usual_length([100] * 99 + [900]) == 100
    assert usual_length([100] * 99 + [140]) == 140
    assert usual_length([5]) == 5 and usual_length([20, 60]) == 60


@pytest.mark.parametrize("rows", [2, 5, 9, 10, 15, 50, 300])
def test_one_row_that_is_120_times_too_long(rows):
    draw = random.Random(rows)
    usual = sorted(draw.randint(30, 45) for _ in range(rows - 1))
    assert usual_length([*usual, 5400]) == usual[-1]
    assert usual_length([*usual, usual[-1]]) == usual[-1]


def test_lengths_that_vary_much_are_not_far_out():
    draw = random.Random(0)
    values = sorted(round(draw.lognormvariate(4, 1)) for _ in range(2000))
    kept = usual_length(values)
    assert sum(value > kept for value in values) <= 0.01 * len(values)
    assert usual_length([20] * 50 + [400] * 50) == 400


@given(st.lists(st.integers(1, 9000), min_size=1))
def test_about_a_tenth_of_the_rows_is_longer_at_most(values):
    """Of few rows one may be, and only if it is ten times as long as others."""
    kept = usual_length(sorted(values))
    longer = sum(value > kept for value in values)
    assert kept in values and longer <= math.ceil(0.11 * len(values))
    assert longer == 0 or len(values) >= 10 or max(values) > FAR_OF_FEW * min(values)


def test_a_client_of_long_examples_raises_the_length_or_is_named():
    usual = {f"c{n}": [40] * 50 for n in range(20)}
    for context, more, expected in (
        (4096, {"long": [900] * 8}, (928, {})),
        (512, {"long": [900] * 8}, (512, {"long": 8})),
        (8192, {"tiny": [40, 5000]}, (64, {"tiny": 1})),
    ):
        found = limited(context, **usual, **more)
        assert (found.longest, found.skipped) == expected


def test_answers_that_are_skipped_do_not_count():
    found = limited(8192, *[40] * 14, 5400)
    assert (found.longest, found.answer, found.skipped) == (64, 32, {"a": 1})


@pytest.mark.parametrize("times", [120, 1])
def test_on_the_command_line(small, llm_fed, tmp_path, times):
    """One row in fifteen is 120 times too long; the twin is clean."""
    for client in ("north", "south"):
        rows = [{"prompt": f"w2{n % 10} w4", "output": f"w{n % 9} w3 w5"} for n in range(15)]
        rows[7]["output"] = " ".join(["w3"] * 4 * (times if client == "south" else 1))
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / f"d/{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = llm_fed("init", tmp_path / "d", "--base", small.base, "--out", tmp_path / "c.yaml")
    config = configfile.load(tmp_path / "c.yaml")
    assert said.code == 0 and (config.task.max_length, config.eval.max_new_tokens) == (32, 32)
    told = "1 of 30 examples are longer than task.max_length=32 and will be skipped: 1 of south"
    assert (told in said.out) == (times > 1) and ("longer than" in said.out) == (times > 1)


def test_a_client_that_would_lose_its_examples_is_named(small, llm_fed, tmp_path):
    """The context of this base is 128; half of the examples of `south` are longer."""
    (tmp_path / "d").mkdir()
    for client, times in (("north", 1), ("south", 200)):
        rows = [{"prompt": " ".join(["w2"] * (1 + n % 5) * times), "output": f"w{n % 9} w3 w5"} for n in range(20)]
        (tmp_path / f"d/{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = llm_fed("init", tmp_path / "d", "--base", small.base, "--out", tmp_path / "c.yaml")
    context = configfile.load(tmp_path / "c.yaml").task.max_length
    assert f"20 of 40 examples are longer than task.max_length={context} and will be skipped: 20 of south" in said.out
    assert "task.too_long=cut-start keeps the ends of their prompts" in said.out
