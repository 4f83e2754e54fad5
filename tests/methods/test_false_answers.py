"""Answers of the right form with numbers that no honest client gives, through each method's own server step."""

import random

import hostile_answers
import pytest

TRIED = ["ifca", "fedex-lora", "fedproto of pictures"]


@pytest.mark.parametrize("name", TRIED)
def test_no_answer_of_one_client_harms_the_others(name, tmp_path):
    draw = random.Random(0)
    outcomes, findings = hostile_answers.attack(name, tmp_path, lambda cases: draw.sample(cases, 2))
    assert not findings and outcomes["refused"] and outcomes.total() == 2


def test_an_answer_with_the_entries_of_another_round_is_refused_by_name(tmp_path):
    """RoLoRA's clients send A and B in turn, so an answer that is sent again has entries that nobody asked for."""
    attacked = hostile_answers.Attacked("rolora", tmp_path)
    (case,) = (case for case in attacked.cases() if case.part == "row" and case.how == "of an earlier round")
    assert attacked.after(case)[1].startswith("upload.entries has no model.layers.0.self_attn.q_proj.lora_")


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile_answers.names())
def test_no_answer_of_one_client_harms_the_others_in_any_method(name, tmp_path):
    draw = random.Random(name)
    some = lambda cases: draw.sample(cases, min(20, len(cases)))  # noqa: E731
    outcomes, findings = hostile_answers.attack(name, tmp_path, some)
    assert not findings and outcomes["refused"]
