"""Methods for late answers: numbers by hand, special cases, and every method under delays, also when it is killed."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from battery import FEDERATED, SETTINGS, WHOLE_MODELS, go

from llm_fed.federation.schedule import Delayed
from llm_fed.method import Method, Upload, by_arrival
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.methods.ca2fl import CA2FL
from llm_fed.methods.fedasync import FedAsync
from llm_fed.methods.fedbuff import FedBuff
from llm_fed.methods.fedit import FedIT
from llm_fed.runs.records import read_records
from llm_fed.settings.config import ServerStepConfig
from llm_fed.state import State
from llm_fed.state.roles import is_variance
from llm_fed.testing.compare import equal_runs
from llm_fed.testing.federation import SIZES

LATE = Delayed(tuple(SIZES), 0.6, 1, sigma=2.0, drop_out=0.1)
ROUNDS = 6


def upload(client: str, value: float, staleness: int = 0, num_examples: int = 1) -> Upload:
    return Upload(client, num_examples, staleness, toy.number(value))


def start(method: Method, *names: str) -> tuple[Site, Any]:
    """A server of these clients, in round 1, and the method's state around the number 10."""
    server = toy.server()
    server.clients, server.draw = names, lambda generator: toy.number(10.0)
    server.begin(1, 0.1)
    return server, method.init(server)


def serve(method: Method, server: Server, state: Any, *uploads: Upload, round: int = 1) -> Any:
    server.begin(round, 0.1)
    return asyncio.run(method.server_update(server, state, list(uploads)))


def value(method: Method, state: Any) -> float:
    return method.broadcast(state, "a").row.item()


def test_arrivals_of_a_round_come_in_a_drawn_order():
    """It does not depend on the order given, and over the rounds everybody is first; another seed draws another one."""
    uploads, orders = [upload(name, 0.0) for name in "abcd"], []
    for seed in (0, 1):
        server = toy.server(seed)
        for round in range(1, 40):
            server.begin(round, 0.1)
            order = [item.client for item in by_arrival(server, uploads)]
            assert order == [item.client for item in by_arrival(server, uploads[::-1])]
            assert sorted(order) == list("abcd")
            orders.append(order)
    assert {order[0] for order in orders[:39]} == set("abcd") and orders[:39] != orders[39:]


def test_fedasync_mixes_each_arrival_by_its_staleness():
    """alpha 0.4, a 0.5: tau 0 weighs 0.4, tau 3 only 0.4 / sqrt(4) = 0.2. So 0.6 * 10 + 0.4 * 20 = 14, and then
    0.8 * 14 + 0.2 * 4 = 12."""
    method = FedAsync()
    server, state = start(method, "a", "b")
    state = serve(method, server, state, upload("a", 20.0))
    assert value(method, state) == pytest.approx(14, abs=1e-12)
    assert value(method, serve(method, server, state, upload("b", 4.0, 3))) == pytest.approx(12, abs=1e-12)


def test_fedbuff_steps_when_its_buffer_is_full():
    """M = 3, eta_g = 0.5: two arrivals move nothing; the third makes 10 + 0.5 / 3 * (1 + 2 + 6) = 11.5; of four at once
    the fourth stays for the next step."""
    method = FedBuff(buffer=3, server_lr=0.5)
    server, state = start(method, "a", "b", "c", "d")
    waiting = serve(method, server, state, upload("a", 1.0), upload("b", 2.0, 4, num_examples=9))
    assert value(method, waiting) == 10 and method.report(waiting) == {"buffered": 2}
    full = serve(method, server, waiting, upload("a", 6.0), round=2)
    assert value(method, full) == pytest.approx(11.5, abs=1e-12) and method.report(full) == {"buffered": 0}
    four = serve(method, server, state, *(upload(name, 6.0) for name in "abcd"))
    assert value(method, four) == pytest.approx(13, abs=1e-12)
    assert four["buffered"] == 1 and four["sum"].row.item() == 6


def test_fedbuff_weighs_late_updates_down():
    """(1 + 3)^-0.5 = 0.5: 10 + (4 + 0.5 * 6) / 2 = 13.5; the divisor stays M."""
    method = FedBuff(buffer=2, staleness_exponent=0.5)
    server, state = start(method, "a", "b")
    after = serve(method, server, state, upload("a", 4.0), upload("b", 6.0, 3))
    assert value(method, after) == pytest.approx(13.5, abs=1e-12)


def test_ca2fl_lets_absent_clients_take_part_with_their_last_update():
    """Four clients, M = 2, eta_g = 1. First step: caches are zero, v = (2 + 6) / 2 = 4, so 14; then h_a = 2, h_b = 6
    and their mean over four is 2. Second step, a sends 4 and c 3: v = 2 + ((4 - 2) + (3 - 0)) / 2 = 4.5, so 18.5; then
    h = 4, 6, 3, 0 with mean 3.25. Third step, b sends 6 and then 8: v = 3.25 + ((6 - 6) + (8 - 6)) / 2 = 4.25, so
    22.75; h_b is the later one, and the mean 3.75."""
    method = CA2FL(buffer=2)
    server, state = start(method, "a", "b", "c", "d")
    expected = [
        ([upload("a", 2.0), upload("b", 6.0, 5)], 14, 2),
        ([upload("a", 4.0), upload("c", 3.0)], 18.5, 3.25),
        ([upload("b", 6.0)], 18.5, 3.25),
        ([upload("b", 8.0)], 22.75, 3.75),
    ]
    for round, (uploads, model, mean) in enumerate(expected, 1):
        state = serve(method, server, state, *uploads, round=round)
        assert value(method, state) == pytest.approx(model, abs=1e-12)
        assert state["mean"].row.item() == pytest.approx(mean, abs=1e-12)
    kept = {key: h.row.item() for key, h in server.memory.items()}
    assert kept == {"cache/a": 4, "cache/b": 8, "cache/c": 3}  # nobody waits


@pytest.mark.parametrize("method", [FedBuff(buffer=1), FedBuff(buffer=1, server_lr=0.1), CA2FL(buffer=1)])
def test_running_statistics_go_towards_what_clients_have(method):
    """Both of a cohort of two have a variance of 0.2, and each counts half: 1, 0.6, 0.4, in the next round 0.3, 0.25.
    Added as changes from the model that they were sent, it would be 1 - 0.8 - 0.8."""
    server, state = start(method, "a", "b")
    server.cohort, model = 2, with_variance(toy.number(10.0), 1.0)
    state = {key: with_variance(value, 0.0) if isinstance(value, State) else value for key, value in state.items()}
    state["model"] = model
    for round, expected in enumerate((0.4, 0.25), 1):
        change = 0.2 - state["model"].extras["running_var"].item()
        uploads = [Upload(name, 1, 0, with_variance(toy.number(0.0), change)) for name in "ab"]
        state = serve(method, server, state, *uploads, round=round)
        assert state["model"].extras["running_var"].item() == pytest.approx(expected, abs=1e-12)


def with_variance(state: State, value: float) -> State:
    return State(state.layout, state.row, {"running_var": torch.tensor([value], dtype=torch.float64)})


def test_under_a_robust_rule_running_statistics_go_towards_what_clients_have():
    """Two full buffers of three in a round of six: each counts half, so 1, 0.6, 0.4."""
    method = FedBuff(buffer=3)
    server, _ = start(method, *"abcdef")
    server.cohort, server.step = 6, ServerStepConfig(aggregation="median", liars=0.4)
    state = {"model": with_variance(toy.number(10.0), 1.0), "updates": [], "buffered": 0}
    uploads = [Upload(name, 1, 0, with_variance(toy.number(0.0), -0.8)) for name in "abcdef"]
    model = serve(method, server, state, *uploads)["model"]
    assert model.extras["running_var"].item() == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize("settings", [{}, {"wait": "first_n"}, {"wait": "deadline"}])
def test_fedbuff_of_the_whole_cohort_is_fedavg(tmp_path, monkeypatch, settings):
    """Without delay and with equal numbers of examples; three rounds of real training."""
    monkeypatch.setitem(SIZES, "c1", 5)
    monkeypatch.setitem(SIZES, "c2", 5)
    fedbuff = go("fedbuff", tmp_path / "fedbuff", settings={"buffer": 3})
    fedavg = go("fedit", tmp_path / "fedavg", settings=settings)
    assert fedbuff.losses() == pytest.approx(fedavg.losses(), abs=1e-12)
    one, other = (run.method.broadcast(run.state, "c0").row for run in (fedbuff, fedavg))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_fedit_can_wait_for_a_deadline():
    """10 + 4: the late 100 is dropped, and a round in which all is late leaves the model as it is."""
    method = FedIT(wait="deadline")
    server, state = start(method, "a", "b")
    assert value(method, serve(method, server, state, upload("a", 4.0), upload("b", 100.0, 1))) == 14
    assert value(method, serve(method, server, state, upload("b", 100.0, 1))) == 10
    assert value(FedIT(), serve(FedIT(), server, state, upload("a", 4.0), upload("b", 100.0, 1))) == 62


def test_fedit_can_wait_for_the_first_answers_to_the_current_model():
    """N = 2. Round 1 brings one answer; round 2 one to round 1's model: the same one, so 10 + (1 * 2 + 3 * 6) / 4 = 15.
    Round 3 brings an answer from round 2, to the old model, which is dropped, and one from round 3; round 5 a second to
    the model of round 3: 15 + (1 + 3) / 2 = 17."""
    method = FedIT(wait="first_n")
    server, state = start(method, "a", "b")
    server.cohort = 2
    rounds: list[tuple[list[Upload], float]] = [
        ([upload("a", 2.0)], 10),
        ([upload("b", 6.0, 1, num_examples=3)], 15),
        ([upload("a", 100.0, 1), upload("b", 1.0)], 15),
        ([], 15),
        ([upload("a", 3.0, 2)], 17),
    ]
    for round, (uploads, expected) in enumerate(rounds, 1):
        state = serve(method, server, state, *uploads, round=round)
        assert value(method, state) == pytest.approx(expected, abs=1e-12), round
    # Of three answers at once, as over-sampling brings, the last in the drawn order is dropped.
    server, state = start(method, "a", "b", "c")
    server.cohort = 2
    uploads = [upload("a", 1.0), upload("b", 2.0), upload("c", 6.0)]
    one, two, _ = (item.content.row.item() for item in by_arrival(server, uploads))
    assert value(method, serve(method, server, state, *uploads)) == pytest.approx(10 + (one + two) / 2, abs=1e-12)


VARIANTS = [
    *((name, SETTINGS.get(name, {})) for name in FEDERATED),
    ("fedit", {"wait": "deadline"}),
    ("fedit", {"wait": "first_n"}),
    ("fedbuff", {"buffer": 2, "staleness_exponent": 0.5}),
]


# One of each family, and each way of waiting; all are continued by the battery, too, if not with late answers.
QUICK = ("fedit", "scaffold", "fedmerge", "fedasync", "fedbuff", "ca2fl")
CASES = [
    pytest.param(n, s, id=f"{n}-{s.get('wait', '')}", marks=() if n in QUICK else pytest.mark.slow) for n, s in VARIANTS
]


@pytest.mark.parametrize("name, settings", CASES)
def test_every_method_runs_under_delay_and_continues_bit_identically(tmp_path: Path, name, settings):
    schedule = {"schedule": LATE, "rounds": ROUNDS, "settings": settings}
    whole = go(name, tmp_path / "whole", **schedule)
    lines = read_records(whole.folder / "metrics.jsonl")
    assert [line["round"] for line in lines if line["kind"] == "round"] == list(range(1, ROUNDS + 1))
    clients = [line for line in lines if line["kind"] == "client"]
    assert all(math.isfinite(line["loss"]) for line in clients)
    assert max(line["staleness"] for line in clients) >= 2
    for stop in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            go(name, tmp_path / "killed twice", stop_after=stop, **schedule)
    equal_runs(go(name, tmp_path / "killed twice", **schedule), whole)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_no_variance_falls_below_zero_and_nobody_honest_is_refused(name, schedule, tmp_path):
    run = go(name, tmp_path, schedule=schedule, rounds=8)
    models = run.ask("personalize", run.messages()).values()
    variances = [value for model in models for key, value in model.extras.items() if is_variance(key)]
    assert variances and all(bool((value > 0).all()) for value in variances)
    assert not [line for line in run.records("event") if line["event"] == "refused upload"]
