"""Late answers: who is asked, how late they are, what never arrives, and that no method and no restart changes it."""

import math
from collections import Counter
from statistics import NormalDist

import pytest
import toy
from toy_rounds import go

from llm_fed.federation.schedule import Ask, Delayed
from llm_fed.method import Method

NAMES = tuple(f"c{i}" for i in range(40))
ROUNDS = range(1, 201)


@pytest.mark.parametrize("participation, number, size", [(0.28, 25, 7), (0.1, 31, 4), (0.001, 5, 1), (1.0, 7, 7)])
def test_a_cohort_is_the_share_rounded_up_and_everybody_has_a_turn(participation, number, size):
    """0.28 * 25 is 7.000000000000001 in floating point. Who is asked stands in client order."""
    names = NAMES[:number]
    schedule = Delayed(names, participation, 3)
    asked = [[ask.client for ask in schedule.asks(round)] for round in ROUNDS]
    assert {schedule.cohort_size, *map(len, asked)} == {size}
    assert all(cohort == sorted(cohort, key=names.index) for cohort in asked) and set().union(*asked) == set(names)


@pytest.mark.parametrize("sigma", [0.8, 5.0])
def test_delays_are_half_normal(sigma):
    """P(floor(|x|) = k) = P(k <= |x| < k + 1) = 2 (Phi((k + 1) / sigma) - Phi(k / sigma)); each share of n independent
    draws lies within four standard deviations of it."""
    schedule = Delayed(tuple(f"c{i}" for i in range(3000)), 1.0, 1, sigma=sigma)
    drawn = [ask.delay for ask in schedule.asks(1)]
    counts, phi = Counter(drawn), NormalDist().cdf
    for k in range(math.ceil(3 * sigma)):
        expected = 2 * (phi((k + 1) / sigma) - phi(k / sigma))
        deviation = math.sqrt(expected * (1 - expected) / len(drawn))
        assert abs(counts[k] / len(drawn) - expected) < 4 * deviation, k


@pytest.mark.parametrize("drop_out", [0.0, 0.3])
def test_nobody_is_asked_while_working(drop_out):
    """An answer that never arrives occupies its client as long as it would have taken."""
    schedule = Delayed(NAMES, 0.25, 7, sigma=5.0, drop_out=drop_out)
    true = {(round, ask.client): ask.delay for round in ROUNDS for ask in schedule.asks(round)}
    for (round, client), delay in true.items():
        length = schedule._delay(round, client)
        assert delay in (length, None)
        assert not any((later, client) in true for later in range(round + 1, round + length + 1))


def test_fewer_are_asked_where_the_others_are_at_work():
    schedule = Delayed(NAMES[:5], 0.6, sigma=10.0)
    sizes = [len(schedule.asks(round)) for round in ROUNDS]
    assert sizes[0] == schedule.cohort_size == 3 and min(sizes) == 0 and max(sizes) == 3
    assert {ask.client for round in ROUNDS for ask in schedule.asks(round)} == set(NAMES[:5])


def test_the_seed_streams_are_separate():
    """Another sigma changes no delay's rank and not who is sampled first; drop-outs change neither cohorts nor
    delays."""
    one, other = Delayed(NAMES, 0.5, sigma=2.0), Delayed(NAMES, 0.5, sigma=9.0)
    assert [ask.client for ask in one.asks(1)] == [ask.client for ask in other.asks(1)]
    assert [ask.delay for ask in one.asks(1)] != [ask.delay for ask in other.asks(1)]
    dropping = Delayed(NAMES, 0.5, sigma=2.0, drop_out=0.4)
    for round in ROUNDS:
        for ask, dropped in zip(one.asks(round), dropping.asks(round), strict=True):
            assert ask.client == dropped.client and dropped.delay in (ask.delay, None)


@pytest.mark.parametrize("settings", [{"participation": 0.5}, {"sigma": 4.0}, {"drop_out": 0.4}])
def test_cohorts_delays_and_drop_outs_follow_the_seed(settings):
    first, again, other = (Delayed(NAMES, seed=seed, **settings).asks(1) for seed in (1, 1, 2))
    assert first == again != other


def test_drop_outs_come_at_their_rate():
    """Of n answers within four standard deviations of 0.25 n."""
    schedule = Delayed(NAMES, 0.5, sigma=1.0, drop_out=0.25)
    asks = [ask for round in ROUNDS for ask in schedule.asks(round)]
    dropped = sum(ask.delay is None for ask in asks)
    assert len(asks) > 1500
    assert abs(dropped / len(asks) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(asks))


def test_a_round_does_not_depend_on_what_was_asked_before():
    """A process that begins with round 150 sees what one that came from round 1 sees."""
    settings = {"sigma": 3.0, "drop_out": 0.1}
    whole, again = Delayed(NAMES, 0.2, 5, **settings), Delayed(NAMES, 0.2, 5, **settings)
    expected = [whole.asks(round) for round in ROUNDS]
    assert again.asks(150) == expected[149]
    assert again.asks(3) == expected[2]
    again.asks(4).clear()
    assert again.asks(4) == expected[3]


class Dropping:
    """c1 never answers in round 2, and nobody does in round 3."""

    cohort_size = 3

    def asks(self, round: int) -> list[Ask]:
        return [Ask(f"c{i}", None if round == 3 or (round == 2 and i == 1) else 0) for i in range(3)]


def test_who_drops_out_is_logged_and_does_no_work(tmp_path):
    runtime = toy.ToyRuntime({"c0": 1.0, "c1": 2.0, "c2": 4.0})
    progress, _, _, _, lines = go(tmp_path, rounds=4, schedule=Dropping(), runtime=runtime)
    logged = [(line["round"], line["client"]) for line in lines if line["kind"] == "drop-out"]
    assert logged == [(2, "c1"), (3, "c0"), (3, "c1"), (3, "c2")] and not [e for e in lines if e["kind"] == "event"]
    rounds = [line for line in lines if line["kind"] == "round"]
    counts = [tuple(r[key] for key in ("asked", "arrived", "failed", "dropped_out")) for r in rounds]
    assert counts == [(3, 3, 0, 0), (3, 2, 0, 1), (3, 0, 0, 3), (3, 3, 0, 0)]
    assert rounds[2]["bytes_up"] == 0 and rounds[2]["bytes_down"] == rounds[0]["bytes_down"]  # they were sent the model
    assert len(runtime.log) == 3 + 2 + 0 + 3 and progress.in_flight == []


def test_staleness_and_arrival_are_the_schedules(tmp_path):
    """Every upload reaches the server in the round and with the staleness that the schedule said."""
    schedule = Delayed(("c0", "c1", "c2"), 0.6, 2, sigma=2.0, drop_out=0.2)
    seen: list[tuple[int, str, int]] = []

    class Listening(Method):
        async def server_update(self, server, state, uploads):
            seen.extend((server.round, upload.client, upload.staleness) for upload in uploads)
            return state

    progress, *_ = go(tmp_path, Listening(), rounds=20, schedule=schedule)
    sent = [(round + ask.delay, ask.client, ask.delay)
            for round in range(1, 21) for ask in schedule.asks(round) if ask.delay is not None]  # fmt: skip
    assert sorted(seen) == sorted(item for item in sent if item[0] <= 20) and max(late for *_, late in seen) > 1
    assert len(progress.in_flight) == sum(arrival > 20 for arrival, *_ in sent)


def test_methods_see_the_same_arrivals(tmp_path):
    """A method that draws from every stream it can reach changes nothing."""

    class Drawing(Method):
        async def client_update(self, client, message):
            client.sample(1), client.initial(client.round)
            return await super().client_update(client, message)

    logs = []
    for name, method in (("plain", Method()), ("drawing", Drawing())):
        schedule = Delayed(("c0", "c1", "c2"), 0.6, sigma=1.5, drop_out=0.2)
        *_, lines = go(tmp_path / name, method, rounds=12, schedule=schedule)
        logs.append([(line["kind"], line["round"], line.get("client"), line.get("staleness")) for line in lines])
    assert logs[0] == logs[1] and len({line[3] for line in logs[0]}) > 2
