"""Secure aggregation opens the sum of those who answered, bit for bit, or nothing."""

import random
from collections import Counter
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parties import Parties, names_of

from llm_fed.federation.summing import MOST_CLIENTS, Ring
from llm_fed.secure import cohort as cohorts
from llm_fed.secure import keys, opening
from llm_fed.secure.cohort import Cohort, Terms
from llm_fed.secure.keys import Unsafe
from llm_fed.secure.opening import GivenUp


def vectors_of(names, size: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-(2**31), 2**31, (size,), generator=draw, dtype=torch.int32) for name in names}


def added(vectors, who) -> torch.Tensor:
    return sum((vectors[name].long() for name in who), torch.zeros(1, dtype=torch.long)).to(torch.int32)


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 12), st.integers(1, 40), st.sampled_from([4, 6, 100]), st.randoms(use_true_random=False))
def test_the_sum_is_that_of_the_integers_whoever_vanishes(number, size, degree, chance):
    """Over cohorts, graphs and drop-outs in each phase: the sum of those who answered, modulo 2^32, or no sum."""
    names = list(names_of(number))
    chance.shuffle(names)
    vectors, vanish = vectors_of(names, size, chance.randrange(2**31)), []
    for _ in range(3):
        vanish.append({name for name in names if chance.random() < chance.choice([0, 0.1, 0.3])})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cohorts, "DEGREE", degree)
        try:
            total, alive = Parties(names).round(vectors, vanish)
        except (GivenUp, Unsafe):
            assert any(vanish)
            return
    assert alive == [name for name in names if name not in vanish[0] | vanish[1]]
    assert torch.equal(total, added(vectors, alive))


@pytest.mark.parametrize("point", range(3))
def test_a_third_may_vanish_at_each_point(point):
    """Of ten clients, each of which is everybody's neighbour, 20 draws of three complete the round exactly."""
    names = names_of(10)
    for seed in range(20):
        vanish = [set(), set(), set()]
        vanish[point] = set(random.Random(seed).sample(names, 3))
        vectors = vectors_of(names, 5, seed)
        total, alive = Parties(names).round(vectors, vanish)
        assert len(alive) == 10 - 3 * (point < 2) and torch.equal(total, added(vectors, alive))


@pytest.mark.slow
@pytest.mark.parametrize("point", range(3))
def test_thirty_percent_vanish_among_a_hundred_neighbours(point):
    """Of 120 clients 36 go, in 20 draws. The sum is exact where of each one's group enough are left, and else stays
    closed. What comes before they go is the same in all draws."""
    names, draws = names_of(120), Counter[bool]()
    everybody, vectors = Parties(names), vectors_of(names, 5, 0)
    cohort = everybody.cohort(names)
    prepared, terms, alive = everybody.prepare(cohort, names), Terms(cohort, names, "message", 1), [*names]
    masked, proofs = everybody.mask(terms, prepared, vectors) if point else ({}, {})
    told = everybody.reveal(cohort, names, proofs, names) if point == 2 else {}
    memories = deepcopy({name: party.memory for name, party in everybody.parties.items()})
    for seed in range(20):
        gone = {*random.Random(seed).sample(names, 36)}
        left = [name for name in names if name not in gone]
        alive = left if point < 2 else alive
        for name, party in everybody.parties.items():
            party.memory = deepcopy(memories[name])
        groups = [cohort.group(name) for name in (names if point else left)]
        draws[enough := all(len({*group} - gone) >= cohort.threshold for group in groups)] += 1
        try:
            if point == 0:
                terms, prepared_left = Terms(cohort, tuple(left), "message", 1), {n: prepared[n] for n in left}
                masked, proofs = everybody.mask(terms, prepared_left, {n: vectors[n] for n in left})
            if point < 2:
                told = everybody.reveal(cohort, left, proofs, left)
            total = added(masked, alive)
            opening.open_sum(terms, prepared, alive, total, {name: told[name] for name in left})
        except (GivenUp, Unsafe):
            assert not enough
        else:
            assert enough and torch.equal(total, added(vectors, alive))
    print(f"vanished in phase {point + 1}: {draws[True]} of 20 sums are exact, and the others stay closed")
    assert draws[True] and draws[False]


def test_with_one_more_than_a_third_gone_nothing_is_opened():
    names = names_of(10)
    for point in range(3):
        vanish = [set(), set(), set()]
        vanish[point] = set(names[:4])
        with pytest.raises((GivenUp, Unsafe)):
            Parties(names).round(vectors_of(names, 5, 0), vanish)


def test_neighbours_are_mutual_and_drawn_by_the_cohort():
    names = names_of(301)
    first, second = Cohort("run", 1, 1, names), Cohort("run", 2, 1, names)
    for name in names:
        group = first.group(name)
        assert len(group) == len({*group}) == cohorts.DEGREE + 1 and name in group
        assert [first.point(other, name) for other in group] == list(range(1, len(group) + 1))
        assert all(name in first.group(other) for other in group)
    shared = len({*first.group("c000")} & {*second.group("c000")})
    assert shared < 60  # a third of them by chance
    small = Cohort("run", 1, 1, names[:5])
    assert all(set(small.group(name)) == set(names[:5]) for name in names[:5])


@given(st.integers(3, cohorts.DEGREE + 1))
def test_two_secrets_of_one_client_are_never_both_opened(members):
    """Each honest member gives one of the two, and less than a third are on the server's side."""
    liars, threshold = max(0, -(-members // 3) - 1), Cohort("run", 1, 1, tuple(map(str, range(members)))).threshold
    if members > 3:
        assert 2 * threshold > members + liars
    assert 3 <= threshold <= members


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 30), st.randoms(use_true_random=False))
def test_shares_give_the_secret_and_one_fewer_nothing(threshold, more, chance):
    secret = keys.fresh()
    dealt = keys.split(secret, threshold + more, threshold)
    points = chance.sample(range(1, threshold + more + 1), threshold)
    assert keys.combine({point: dealt[point - 1] for point in points}) == secret
    if threshold > 1:  # any other secret would fit to the rest with some value of the last share
        rest = {point: dealt[point - 1] for point in points[:-1]}
        assert len({keys.combine({**rest, points[-1]: value}) for value in range(5)}) == 5


@settings(max_examples=50, deadline=None)
@given(st.integers(1, MOST_CLIENTS), st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_numbers_of_a_whole_cohort_at_the_bound_do_not_overflow(clients, bound, seed):
    ring = Ring(clients, bound)
    for end in (bound, -bound):
        encoded = ring.encode(torch.full((3,), end), seed.to_bytes(32))
        assert int(encoded.abs().max()) * clients < 2**31
        assert torch.allclose(ring.decode(encoded), torch.full((3,), end, dtype=torch.float64), atol=ring.step)


def test_rounding_has_the_right_mean():
    ring, vector = Ring(1000, 2.0), torch.full((200_000,), 0.3 * Ring(1000, 2.0).step)
    encoded = ring.encode(vector, bytes(32))
    assert Counter(encoded.tolist()).keys() == {0, 1} and abs(float(encoded.double().mean()) - 0.3) < 0.005
    assert not torch.equal(encoded, ring.encode(vector, b"\1" * 32))
