"""How clients' updates compare in norm and direction."""

import torch

from llm_fed.federation.directions import compared
from llm_fed.method import Method, Upload
from llm_fed.methods.fedasync import FedAsync
from llm_fed.state import Layout, State

LAYOUT = Layout(("w",), ((3,),))


def state(*values):
    return State(LAYOUT, torch.tensor(values, dtype=torch.float32))


def uploads(**rows):
    return [Upload(client, 1, 0, state(*row)) for client, row in rows.items()]


def test_norms_and_cosines_by_hand():
    """c points against the others: its cosine with a + b = (2, 0, 0) is -1; a's with b + c = (-1, 0, 0) is -1."""
    found = compared(Method(), state(0, 0, 0), uploads(a=(1, 0, 0), b=(1, 0, 0), c=(-2, 0, 0)))
    assert found == {"a": [1.0, -1.0], "b": [1.0, -1.0], "c": [2.0, -1.0]}
    found = compared(Method(), state(0, 0, 0), uploads(a=(3, 4, 0), b=(3, 0, 0)))
    assert found == {"a": [5.0, 0.6], "b": [3.0, 0.6]}


def test_alone_or_zero_there_is_no_direction():
    assert compared(Method(), state(0, 0, 0), uploads(a=(1, 0, 0))) == {"a": [1.0, None]}
    found = compared(Method(), state(0, 0, 0), uploads(a=(0, 0, 0), b=(1, 0, 0)))
    assert found == {"a": [0.0, None], "b": [1.0, None]}


def test_of_a_model_its_change_counts():
    """FedAsync uploads models: 10 + 1 and 10 - 1 are nearly alike, and their changes are opposite."""
    found = compared(FedAsync(), state(10, 0, 0), uploads(a=(11, 0, 0), b=(9, 0, 0)))
    assert found == {"a": [1.0, -1.0], "b": [1.0, -1.0]}


def test_what_has_no_states_is_left_out():
    assert compared(Method(), state(0, 0, 0), [Upload("a", 1, 0, {"counts": 3})]) == {}
