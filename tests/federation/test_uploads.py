"""Checks of what clients send: shapes, types, values that are not finite, and norms beside the others' norms."""

import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import toy
from toy_rounds import TARGETS, go

from llm_fed.federation.uploads import compared, flaws
from llm_fed.method import Method, Upload
from llm_fed.method.requests import Fitted
from llm_fed.methods.fedasync import FedAsync
from llm_fed.methods.ifca import IFCA
from llm_fed.state import Layout, State
from llm_fed.state.outline import skeleton
from llm_fed.state.roles import Given


@dataclass(frozen=True)
class Poisoned(Method):
    """c1 sends something wrong in round 3."""

    how: str = "nan"

    async def client_update(self, client: Any, message: Any) -> Any:
        delta = await super().client_update(client, message)
        if client.id != "c1" or client.round != 3:
            return delta
        if self.how == "shape":
            return delta.select("lora_A")
        if self.how == "dtype":
            return State(delta.layout, delta.row.float())
        if self.how == "kind":
            return {"delta": delta}
        return delta.like(delta.row * {"nan": math.nan, "inf": math.inf, "huge": 1e6, "overflow": 1e300}[self.how])


@pytest.mark.parametrize(
    "how, reason",
    [
        ("shape", "upload.entries has no model.layers.0.q.lora_B"),
        ("dtype", "upload.dtype is torch.float32, expected torch.float64"),
        ("kind", "upload has no dtype"),
        ("nan", "it holds NaN or infinite values"),
        ("inf", "it holds NaN or infinite values"),
        ("huge", "over 10 times the median"),
        ("overflow", "or its norm overflows"),
    ],
)
def test_a_wrong_upload_is_refused_and_the_round_goes_on(tmp_path, how, reason):
    progress, _, _, _, lines = go(tmp_path, Poisoned(how), rounds=3)
    events = [line for line in lines if line["kind"] == "event"]
    assert [(e["round"], e["client"], e["event"]) for e in events] == [(3, "c1", "refused upload")]
    assert reason in events[0]["reason"]
    assert progress.state.is_finite()
    assert [line for line in lines if line["kind"] == "round"][2]["refused"] == 1


@pytest.mark.parametrize("bound, refused", [(None, 0), (1e9, 0), (10.0, 1), (3.0, 1)])
def test_the_norm_bound_is_the_configurations(tmp_path, bound, refused):
    """c1's update is a million times what it should be; without a bound it is taken, as long as it is finite."""
    config = toy.config(rounds=3, norm_bound=bound)
    *_, lines = go(tmp_path / "huge", Poisoned("huge"), rounds=3, config=config)
    assert [line["refused"] for line in lines if line["kind"] == "round"] == [0, 0, refused]
    *_, lines = go(tmp_path / "inf", Poisoned("inf"), rounds=3, config=config)
    assert "NaN or infinite" in next(line["reason"] for line in lines if line["kind"] == "event")


def test_norms_are_compared_with_the_median_of_what_arrives():
    """Of 1, 2, 30 the median is 2, so that 30 passes a bound of 15 and not one of 14.9; what has another flaw does not
    count; who arrives alone is the median, and of two nobody is twice the mean."""

    def found(*norms, bound, others=()):
        contents = [State.of({"x": torch.tensor([norm])}) for norm in norms]
        expected = [skeleton(contents[0])] * (len(norms) + len(others))
        return [bool(flaw) for flaw in flaws([*contents, *others], [*map(Given, expected)], bound)]

    assert found(1.0, 2.0, 30.0, bound=15.0) == [False] * 3
    assert found(1.0, 2.0, 30.0, bound=14.9) == [False, False, True]
    assert found(1.0, math.nan, 2.0, math.inf, 30.0, bound=14.9) == [False, True, False, True, True]
    others = [State.of({"y": torch.tensor([100.0])})] * 2
    assert found(1.0, 2.0, 30.0, bound=14.9, others=others) == [False, False, True, True, True]
    assert found(1e30, bound=1.1) == [False] and found(1.0, 1e30, bound=2.0) == [False, False]
    assert found(1.0, 2.0, 1e30, bound=None) == [False] * 3


def test_norms_are_compared_part_by_part():
    """Of three messages one has a part of 12 where the others have 4, which is 3 times the median, however large the
    parts beside it are; whole numbers do not count."""
    contents = [
        {"a": State.of({"x": torch.tensor([1e3])}), "b": [torch.tensor([b]), c, 10**9, torch.tensor([10**9])]}
        for b, c in ((0.0, 4.0), (0.0, 4.0), (4.0, 12.0))
    ]
    for bound, refused in ((3.01, False), (2.99, True)):
        found = flaws(contents, [Given(skeleton(contents[0]))] * 3, bound)
        assert [bool(flaw) for flaw in found] == [False, False, refused]
    assert found[2] == "the norm of upload.b.1 12 is over 2.99 times the median 4 of this round (norm_bound)"


@pytest.mark.parametrize(
    "extras, reason",
    [
        ({"mean": torch.tensor([2.0])}, ""),  # they are in no norm
        ({"mean": torch.tensor([1e30])}, "upload.extras.mean holds 1e"),
        ({"mean": torch.tensor([math.nan])}, "upload.mean: it holds NaN or infinite values"),
        ({"mean": torch.tensor([math.inf])}, "upload.mean: it holds NaN or infinite values"),
        ({"mean": torch.zeros(2)}, r"upload.extras.mean.shape is \[2\], expected \[1\]"),
        ({"mean": torch.zeros(1).double()}, "upload.extras.mean.dtype is torch.float64, expected torch.float32"),
        ({"var": torch.zeros(1)}, "upload.extras has no mean"),
        ({}, "upload has no extras"),
    ],
)
def test_running_statistics_are_checked(extras, reason):
    """Beside two uploads of norm 1 that are as they should be."""
    usual, odd = (State.of({"x": torch.ones(1)}, values) for values in ({"mean": torch.ones(1)}, extras))
    given = [Given.of(usual, 1)] * 3
    *others, found = flaws([usual, usual, odd], given, 10.0)
    assert others == ["", ""] and bool(found) == bool(reason) and re.match(reason, found)


def test_where_most_change_nothing_those_who_do_are_compared_with_each_other():
    """Of 0, 0, 0, 1, 2, 100 the median of what is not 0 is 2; of zeros alone nobody is refused."""

    def found(*norms):
        contents = [State.of({"x": torch.tensor([norm])}) for norm in norms]
        return [bool(flaw) for flaw in flaws(contents, [Given(skeleton(contents[0]))] * len(norms), 10.0)]

    assert found(0.0, 0.0, 0.0, 1.0, 2.0, 100.0) == [False] * 5 + [True]
    assert found(0.0, 0.0, 0.0) == [False] * 3 and found(0.0, 0.0, 5.0) == [False] * 3


VARIANCE = "running_var"


def with_variance(state: State, value: float) -> State:
    return State(state.layout, state.row, {VARIANCE: torch.tensor([value], dtype=torch.float64)})


class Settled(Method):
    """Whatever clients are sent, their running variance is 0.2 after training."""

    def init(self, server: Any) -> Any:
        return with_variance(server.initial(), 1.0)

    async def client_update(self, client: Any, message: Any) -> Any:
        return with_variance(message * 0.0, 0.2) - with_variance(message * 0.0, float(message.extras[VARIANCE]))


def test_a_late_answer_brings_the_running_statistics_that_the_client_had(tmp_path):
    """All three are sent a variance of 1 in round 1 and answer in rounds 1, 2 and 3. Added to what the model has by
    then, the second change of -0.8 would make it -0.6."""
    progress, *_, lines = go(tmp_path, Settled(), rounds=3, schedule=toy.LateSchedule(("c0", "c1", "c2")))
    assert [line["arrived"] for line in lines if line["kind"] == "round"] == [1, 1, 1]
    assert progress.state.extras[VARIANCE].item() == pytest.approx(0.2, abs=1e-12)


class Halving(toy.ToyRuntime):
    """Training halves the running variance."""

    def _fit(self, job: Any) -> Any:
        fitted = super()._fit(job)
        return Fitted(with_variance(fitted.state, float(job.start.extras[VARIANCE]) / 2), fitted.losses)


class Unlike(IFCA):
    """The first model has a small variance already."""

    def init(self, server: Any) -> Any:
        state = super().init(server)
        models = [with_variance(model, value) for model, value in zip(state["models"], (0.1, 1.0), strict=True)]
        return {**state, "models": models}


def test_an_honest_client_of_ifca_may_choose_any_model(tmp_path):
    """The server's checks know the statistics of the first model alone: 0.1 and a change from 1 to 0.5 would be a
    variance of -0.4."""
    method = Unlike(num_models=2, warmup_rounds=1)
    progress, *_, lines = go(tmp_path, method, rounds=1, runtime=Halving(TARGETS))
    assert [line["arrived"] for line in lines if line["kind"] == "round"] == [3]
    assert [model.extras[VARIANCE].item() for model in progress.state["models"]] == [0.05, 0.5]


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
