"""`privacy.secure` in a simulation: runs equal the plain ones up to the rounding, and what needs more than sums is
refused by name."""

import math
from dataclasses import dataclass

import pytest
import torch
import toy
from toy_rounds import TARGETS, go

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.federation import summing
from llm_fed.federation.aggregation import check
from llm_fed.federation.schedule import Ask
from llm_fed.federation.summing import MOST_CLIENTS
from llm_fed.method import Upload
from llm_fed.method.site import Data
from llm_fed.methods.feddyn import FedDyn
from llm_fed.methods.fedit import FedIT
from llm_fed.methods.fedopt import FedAvgM
from llm_fed.methods.scaffold import Scaffold
from llm_fed.state import State
from llm_fed.state.outline import leaves


def config(**settings):
    sgd = {"lr": 0.1, "lr_end": 0.1, "optimizer": "sgd"}
    private = {"secure": True, "bound": 100.0} | settings.pop("privacy", {})
    return toy.config(**{"rounds": 4, "local": sgd, "privacy": private, **settings})


@dataclass(frozen=True)
class OfSGD(Scaffold):
    def init(self, server):
        server.local = config().local
        return super().init(server)


METHODS = [FedIT(), FedAvgM(), FedDyn(), OfSGD(), methods.build({"name": "fedadam"})]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_runs_equal_the_plain_ones_up_to_the_rounding(tmp_path, method):
    """Of methods that need a mean weighed by examples, one of all alike, a count, and two sums."""
    plain, *_ = go(tmp_path / "plain", method, config=config(privacy={"secure": False, "bound": 2.0}))
    summed, *_, lines = go(tmp_path / "summed", method, config=config())
    for (path, one), (_, other) in zip(leaves(plain.state), leaves(summed.state), strict=True):
        if isinstance(one, State):
            assert torch.allclose(one.row, other.row, atol=1e-5), path
            assert not torch.equal(one.row, other.row) or not one.row.any()
    kinds = {line["kind"] for line in lines}
    assert "event" not in kinds and not any("updates" in line for line in lines)


def test_a_run_that_is_killed_continues_bit_for_bit(tmp_path):
    toy.plant(tmp_path / "whole")
    toy.plant(tmp_path / "killed")
    whole, *_ = go(tmp_path / "whole", config=config())
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "killed", config=config(), stop_after=2)
    again, *_ = go(tmp_path / "killed", config=config())
    assert whole.state.equal(again.state)
    other, *_ = go(tmp_path / "other", config=config())
    assert not whole.state.equal(other.state)  # rounding is drawn from each run's own secret


@dataclass(frozen=True)
class Poisoned(FedIT):
    """c1 sends NaN in round 3."""

    async def client_update(self, client, message):
        delta = await super().client_update(client, message)
        return delta.like(delta.row * math.nan) if (client.id, client.round) == ("c1", 3) else delta


def test_nan_in_one_update_ends_that_one_alone(tmp_path):
    """c1 of four fails, whatever the others send, and the sum of three is opened."""
    progress, *_, lines = go(tmp_path, Poisoned(), rounds=3, config=config(rounds=3), number=4)
    events = [line for line in lines if line["kind"] == "event"]
    assert [(e["round"], e["client"], e["event"]) for e in events] == [(3, "c1", "client failed")]
    assert "holds NaN" in events[0]["reason"] and progress.state.is_finite()


@dataclass(frozen=True)
class Vanishing:
    """In the second round some of the clients are asked and never answer."""

    names: tuple[str, ...]
    gone: int

    @property
    def cohort_size(self) -> int:
        return len(self.names)

    def asks(self, round: int) -> list[Ask]:
        return [Ask(name, None if round == 2 and k < self.gone else 0) for k, name in enumerate(self.names)]


@pytest.mark.parametrize("gone", [3, 4])
def test_a_round_is_of_those_who_answer_or_given_up(tmp_path, gone):
    """Of ten clients three may vanish; with four gone the server's state stays, and so do the clients' memories."""
    names = tuple(f"c{k}" for k in range(10))
    runs = {}
    for rounds in (1, 2):
        runs[rounds] = go(
            tmp_path / str(rounds), FedDyn(), config=config(rounds=rounds), number=10, schedule=Vanishing(names, gone)
        )
    before, after, lines = runs[1][0].state["model"], runs[2][0].state["model"], runs[2][4]
    given_up = [line for line in lines if line["kind"] == "event" and "is given up" in line["reason"]]
    assert len(given_up) == (6 if gone == 4 else 0)
    moved = float((before.row - after.row).abs().max())
    assert moved > 0.01 if gone == 3 else moved < 1e-4  # up to the rounding of round 1, which each run draws anew
    lost = [line for line in lines if line["kind"] == "drop-out"]
    assert len(lost) == gone


def test_a_longer_update_is_cut_to_the_bound_and_said(tmp_path):
    *_, lines = go(tmp_path, config=config(rounds=1, privacy={"bound": 0.5}))
    events = [line for line in lines if line["kind"] == "event"]
    assert {e["event"] for e in events} == {"clipped"} and len(events) == 3
    assert all("counts with privacy.bound=0.5; set a larger one" in e["reason"] for e in events)


@pytest.mark.parametrize("name", sorted(methods.NAMES))
def test_each_method_is_summed_or_refused_by_name(name):
    """Every method's declaration is one of three, and the message says what works instead."""
    method = methods.build({"name": name})
    settings = config(method={"name": name})
    if summing.summed(method):
        check(settings, method)
        return
    with pytest.raises(UserError, match="privacy.secure") as refused:
        check(settings, method)
    assert name in str(refused.value) and (
        "fedit, fedprox" in str(refused.value) or "llm-fed merge" in str(refused.value)
    )


def test_which_methods_are_summed():
    said = {name for name in methods.NAMES if summing.summed(methods.build({"name": name}))}
    ours = {"feddyn", "scaffold", "fedit", "fedprox", "fedavgm", "ffa", "rolora", "fedsvd", "ditto", "fedlora", "hfcl"}
    assert ours <= said
    assert not said & {"fedmerge", "ifca", "flexlora", "flora", "fedex-lora", "hetlora", "cfl", "fedbuff", "local"}


@pytest.mark.parametrize("name", [n for n in methods.NAMES if summing.summed(methods.build({"name": n})) == "examples"])
def test_a_step_on_three_updates_is_that_on_three_times_their_mean(name):
    """Weighed by numbers of examples, as such methods weigh them; and on the mean alone, where that is all that it
    needs. One of nothing is a step as well."""
    method = methods.build({"name": name})
    draws = torch.Generator().manual_seed(0)
    model, *deltas = (State.of({"x": torch.randn(40, generator=draws, dtype=torch.float64)}) for _ in range(4))
    sizes, optimizers = (1, 2, 5), {"fedavgm", "fedadagrad", "fedadam", "fedyogi"}
    mean = model.like(sum(size * delta.row for size, delta in zip(sizes, deltas, strict=True)) / 8)
    numbers = {"momentum": 0 * model.row, "second": 0 * model.row + 1e-6}
    state = {"model": model, **numbers} if name in optimizers else model
    state = {"model": model, "turn": "lora_B"} if name == "rolora" else state

    def step(*contents):
        server = toy.server()
        server.data, server.clients, server.cohort = Data([0, 0]), ("a", "b", "c"), 3
        server.begin(1, 0.1)
        uploads = [Upload(*of, 0, content) for *of, content in zip("abc", sizes, contents, strict=False)]
        runtime = toy.ToyRuntime({"server": 5.0})
        (found,) = runtime.run({"server": method.server_update(server, state, uploads)}).values()
        return found["model"].row if name in {*optimizers, "rolora"} else found.row

    torch.testing.assert_close(step(*deltas), step(mean, mean, mean), rtol=0, atol=1e-12)
    assert not torch.equal(step(*deltas), step(deltas[0], deltas[0], deltas[0]))
    if method.mean_only:
        torch.testing.assert_close(step(*deltas), step(mean), rtol=0, atol=1e-12)
        torch.testing.assert_close(step(0.0 * mean), step(), rtol=0, atol=1e-12)


REFUSED = [
    ({"server": {"aggregation": "median"}}, "set it to mean"),
    ({"transport": "bfloat16"}, "leave it out"),
    ({"delay": {"sigma": 1.0}}, "set it to 0"),
    ({"network": {"enough": 2}}, "set network.deadline"),
    ({"privacy": {"clip": 1.0, "noise": 1.0, "where": "client"}}, "set privacy.where=server"),
    ({"privacy": {"clip": 1.0, "noise": 1.0}, "participation": 0.5}, "set participation=1"),
]


@pytest.mark.parametrize("settings, what", REFUSED, ids=[what for _, what in REFUSED])
def test_what_does_not_go_together_is_refused_with_what_to_do(settings, what):
    with pytest.raises(UserError, match=f"privacy.secure: .*{what}"):
        check(config(**settings), FedIT())


@pytest.mark.parametrize("cohort, good", [(2, False), (3, True), (MOST_CLIENTS, True), (MOST_CLIENTS + 1, False)])
def test_a_cohort_too_small_or_too_large_is_refused_before_the_first_round(cohort, good):
    if good:
        return summing.check_cohort(cohort)
    with pytest.raises(UserError, match=f"3 to {MOST_CLIENTS:,} clients in a round, and {cohort:,} are asked"):
        summing.check_cohort(cohort)


def test_uploads_of_anything_but_parameters_are_refused():
    state = State.of({"w": torch.zeros(3)})
    buffers = State(state.layout, state.row, {"bn.running_mean": torch.zeros(2)})
    counts = {"w": state, "counts": torch.ones(3)}
    for upload, said in (buffers, "running statistics"), (counts, r"counts \(Tensor\)"):
        with pytest.raises(UserError, match=f"those of mine hold {said}"):
            summing.check_upload(upload, "mine")


def test_with_noise_at_the_server_no_rounding_is_longer_than_the_clip():
    """So epsilon is that of the plain run."""
    private = config(privacy={"clip": 1.0, "noise": 1.0}).privacy
    ring = summing.ring_of(private, 1000)
    upload = State.of({"w": torch.randn(10_000)})
    encoded = summing.numbers(upload, private, ring, 1.0, bytes(32))
    assert 0.99 < float(torch.linalg.vector_norm(ring.decode(encoded))) <= 1.0


def test_the_mean_is_weighed_by_examples():
    method, settings = FedIT(), config()
    answers = {name: State.of({"w": torch.full((4,), value)}) for name, value in TARGETS.items()}
    weights = {"c0": 1, "c1": 2, "c2": 300}
    means, _ = summing.together(answers, weights, list(answers), settings, method, toy.secret(), 1)
    expected = sum(weights[name] * value for name, value in TARGETS.items()) / 303
    assert all(math.isclose(float(mean["w"][0]), expected, abs_tol=1e-5) for mean in means.values())
