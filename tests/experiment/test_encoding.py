"""What does not fit into `task.max_length` is left out of training and of evaluation, and counted."""

from __future__ import annotations

import pytest
import tiny_base

from llm_fed.config import TaskConfig
from llm_fed.errors import UserError
from llm_fed.experiment.encoding import Encoder
from llm_fed.tasks.common import Example

SHORT, LONG = Example("w2 w3", ("w4",)), Example(" ".join(["w2"] * 9), ("w4",))


def encoder(max_length: int = 6) -> Encoder:
    return Encoder(tiny_base.tokenizer(**tiny_base.SPECIAL), TaskConfig(max_length=max_length, template="plain"))


def test_long_examples_are_left_out_and_counted():
    made = encoder()
    assert made.note() == ""
    assert len(made.training("c", "training", [SHORT, LONG, LONG])) == 1
    assert [query.answers for query in made.queries("c", "test", [LONG, SHORT])] == [("w4",)]
    assert made.note() == "2 training and 1 test examples are longer than 6 tokens and are left out"


def test_a_prompt_of_just_max_length_is_asked():
    """Training needs room for the answer and the end, too."""
    made = encoder(max_length=2)
    assert len(made.queries("c", "test", [SHORT])) == 1
    with pytest.raises(UserError, match="none of its 1 training"):
        made.training("c", "training", [SHORT])


def test_the_limit_counts_those_that_fit():
    made = encoder()
    assert len(made.queries("c", "test", [LONG, SHORT, LONG, SHORT, SHORT, LONG], limit=2)) == 2
    assert made.skipped["test"] == 2  # what comes after is not looked at


def test_a_client_of_which_nothing_fits_is_refused():
    with pytest.raises(UserError, match=r"client c: none of its 2 test examples .* task.max_length=6"):
        encoder().queries("c", "test", [LONG, LONG])
    assert encoder().training("c", "validation", [LONG], required=False) == []
    assert encoder().queries("c", "validation", []) == []
