"""FedPool: groups are found among made-up rows, and its special cases are FedAvg."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import Secret
from llm_fed.method import Upload
from llm_fed.method.client import Private
from llm_fed.methods.fedpool import FedPool, cosines, description_length, likely, of_several, partitions
from llm_fed.state import State


def rows(groups: list[int], noise: float, parameters: int = 2000, seed: int = 0) -> torch.Tensor:
    """Rows (m, P) of clients of some groups: what all share, the group's own draw, and noise of the client."""
    draws = torch.Generator().manual_seed(seed)
    signal = torch.randn(max(groups) + 2, parameters, dtype=torch.float64, generator=draws)
    own = torch.randn(len(groups), parameters, dtype=torch.float64, generator=draws)
    return signal[-1] + signal[groups] + noise * own


def run(answers: list[dict[str, torch.Tensor]], sizes: dict[str, int] | None = None, catch_up: float = 0.3) -> dict:
    """The server's state after rounds in which these clients sent these rows."""
    server, method = toy.server(), FedPool(catch_up=catch_up)
    start = State.of({"w": torch.zeros(len(next(iter(answers[0].values()))), dtype=torch.float64)})
    with patch.object(server, "initial", lambda: start):
        state = method.init(server)
    for number, sent in enumerate(answers, 1):
        server.round = number
        uploads = [Upload(name, (sizes or {}).get(name, 1), 0, State.of({"w": row})) for name, row in sent.items()]
        state = asyncio.run(method.server_update(server, state, uploads))
    return state


def named(found: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"c{k:02d}": row for k, row in enumerate(found)}


@pytest.mark.parametrize(
    "groups", [[0] * 4 + [1] * 4 + [2] * 4, [0] * 6 + [1] * 6, [0] * 9 + [1] * 3 + [2] * 6, [k % 5 for k in range(40)]]
)
def test_groups_are_found_without_their_number(groups):
    found = rows(groups, noise=2.0)
    share, best = max(likely(cosines(found @ found.T)))
    labels = {client: number for number, group in enumerate(best) for client in group}
    assert share > 0.5 and adjusted_rand_score(groups, [labels.get(k, -1 - k) for k in range(len(groups))]) == 1


def test_where_there_are_none_hardly_any_are_found():
    """Rows of noise: over thirty draws groups have a probability of less than a seventh on average."""
    shares = []
    for seed in range(30):
        found = rows([0] * 12, noise=1.0, seed=seed)
        shares.append(sum(share for share, _ in likely(cosines(found @ found.T))))
    assert sum(shares) / len(shares) < 1 / 7


def test_what_a_partition_costs():
    """Two groups of four by the formulas: a mean for each and one between them, two variances, 8! / (4! 4!) divisions;
    and one group of all: a mean and a variance."""
    found = rows([0] * 4 + [1] * 4, noise=1.0)
    found[:2] += rows([0] * 2, noise=0.0, seed=1)  # two that are more alike, so that cosines vary within a group
    alike = cosines(found @ found.T)
    lengths = {len(labels.unique()): length for length, labels in partitions(alike)}
    pairs = [(i, j) for i in range(8) for j in range(i)]
    within = [torch.stack([alike[i, j] for i, j in pairs if i // 4 == j // 4 == own]) for own in (0, 1)]
    between = torch.stack([alike[i, j] for i, j in pairs if i // 4 != j // 4])
    rest, others = (sum(float((each - each.mean()).square().sum()) for each in own) for own in (within, [between]))
    assert rest / 10 > others / 16
    fit = 12 / 2 * math.log(rest / 12) + 16 / 2 * math.log(others / 16)
    assert lengths[2] == pytest.approx(fit + 5 / 2 * math.log(28) + math.log(70), abs=1e-9)
    whole = torch.stack([alike[i, j] for i, j in pairs])
    assert lengths[1] == pytest.approx(28 / 2 * math.log(whole.var(correction=0)) + math.log(28), abs=1e-9)
    assert lengths[2] < lengths[1]


def test_a_variance_for_all_where_that_within_groups_is_no_larger():
    """0.01 / (12 - 2) is less than 1 / 16: three means and one variance, of 28 cosines."""
    wanted = 28 / 2 * math.log(1.01 / 28) + 4 / 2 * math.log(28)
    assert description_length(0.01, 12, 2, 1.0, 16, 8) == pytest.approx(wanted)


def test_few_clients_are_fedavg():
    """Of six clients there are fifteen cosines, of which no group can be told."""
    found = rows([0, 0, 0, 1, 1, 1], noise=0.1)
    assert likely(cosines(found @ found.T)) == []
    state = run([named(found)])
    assert torch.equal(FedPool().broadcast(state, "c00").row, state["mean"].row)


def test_the_model_of_all_is_fedavgs():
    """Two rounds with sizes 1 and 3: (1 + 3 * 5) / 4 + 2 = 6; a client that was never asked is sent that."""
    one = torch.ones(1, dtype=torch.float64)
    state = run([{"a": 1 * one, "b": 5 * one}, {"a": 2 * one}], {"a": 1, "b": 3})
    assert state["mean"].row.tolist() == [6.0]
    assert FedPool().broadcast(state, "new").row.tolist() == [6.0]


def test_where_all_are_one_group_nobody_catches_up():
    """Also where a client brings more examples the second time: FedAvg goes 2 in the first round, and then 0."""
    with patch.object(FedPool, "probable", lambda self, state: (0.6, 0.4, [["a"], ["b"]])):
        state = run([{"a": torch.ones(1), "b": 3 * torch.ones(1)}])
        again = [Upload(name, size, 0, State.of({"w": torch.zeros(1)})) for name, size in (("a", 1), ("b", 3))]
        state = asyncio.run(FedPool().server_update(toy.server(), state, again))
    assert state["groups"] == [["a", "b"]] and state["mean"].row.tolist() == [2.0]  # groups are less probable


def groups_of(state: dict) -> list[list[str]]:
    return sorted(map(sorted, state["groups"]))


def test_a_group_has_the_model_that_fedavg_gives_it():
    """Three rounds of eight clients in two groups: each is sent the sum over rounds of its group's weighted means."""
    groups, sizes = [0] * 4 + [1] * 4, {f"c{k:02d}": k + 1 for k in range(8)}
    rounds = [rows(groups, noise=0.2, seed=seed) for seed in range(3)]
    state = run([named(found) for found in rounds], sizes)
    assert groups_of(state) == [list(sizes)[:4], list(sizes)[4:]]
    weights = torch.arange(1, 9, dtype=torch.float64)
    for k in range(8):
        own = slice(0, 4) if k < 4 else slice(4, 8)
        wanted = sum(weights[own] @ each[own] / weights[own].sum() for each in rounds)
        torch.testing.assert_close(FedPool().broadcast(state, f"c{k:02d}").row, wanted)


@pytest.mark.parametrize("catch_up, way", [(0.0, [0, 0]), (0.3, [0.3, 0.51]), (1.0, [1, 1])])
def test_a_group_that_is_found_late_catches_up(catch_up, way):
    """Clients of two kinds go by +1 and -1 in each round. They are one group for two rounds, and stay at 0. Then each
    kind makes its own step in each round, and so much of the two steps that it missed."""
    one = torch.ones(1, dtype=torch.float64)
    sent = {"a": one, "b": one, "c": -one, "d": -one}
    with patch.object(FedPool, "probable", lambda self, state: next(told)):
        for rounds, wanted in ((3, 1 + 2 * way[0]), (4, 2 + 2 * way[1])):
            told = iter([(1.0, 0.0, [])] * 2 + [(0.0, 1.0, [["a", "b"], ["c", "d"]])] * 2)
            state = run([sent] * rounds, catch_up=catch_up)
            assert [float(FedPool().broadcast(state, name).row) for name in "acx"] == pytest.approx(
                [wanted, -wanted, 0]
            )


@given(
    partitions=st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=6),
    catch_up=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_update_is_lost_whatever_the_groups(partitions, catch_up):
    """A client's model and what it is ahead of it add up to the sum of all its updates, whichever groups came."""
    names, draws = list("abcde"), torch.Generator().manual_seed(0)
    sent = [dict(zip(names, torch.randn(5, 3, dtype=torch.float64, generator=draws), strict=True)) for _ in partitions]
    told = iter(partitions)

    def probable(self, state):
        labels = next(told)
        groups = [[name for name, label in zip(names, labels, strict=True) if label == k] for k in sorted(set(labels))]
        return 0.0, 1.0, groups

    with patch.object(FedPool, "probable", probable):
        state = run(sent, {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, catch_up)
    for name in names:
        total = FedPool().broadcast(state, name).row + state["ahead"][name]
        torch.testing.assert_close(total, sum(each[name] for each in sent))


def test_who_does_not_answer_goes_with_its_group():
    """Each round another half of each group answers with the same step: a group goes one step per round, and nobody is
    ahead of it."""
    found = rows([0] * 6 + [1] * 6, noise=0.0)
    halves = [{f"c{k:02d}": found[k] for k in range(12) if k % 2 == part} for part in (0, 1)]
    groups = [[f"c{k:02d}" for k in range(6)], [f"c{k:02d}" for k in range(6, 12)]]

    def probable(self, state):
        return 0.0, 1.0, [[client for client in group if client in state["recent"]] for group in groups]

    with patch.object(FedPool, "probable", probable):
        state = run([halves[number % 2] for number in range(6)])
    torch.testing.assert_close(FedPool().broadcast(state, "c00").row, 6 * found[0])
    assert all(float(row.norm()) < 1e-9 for row in state["ahead"].values())


def test_evidence_is_kept_up_to_date():
    """A row forgets a fifth when its client answers, and evidence is the sum of all products, round by round."""
    first, second = rows([0] * 4 + [1] * 4, noise=1.0), rows([0] * 4 + [1] * 4, noise=1.0, seed=1)
    state = run([named(first[:6]), {"c02": second[2], "c07": second[7]}])
    recent = torch.zeros(7, first.shape[1], dtype=torch.float64)
    recent[:6] = first[:6] - first[:6].mean(0)
    evidence = recent @ recent.T
    between = (second[2] - second[7]) / 2
    recent[2], recent[6] = 0.8 * recent[2] + between, -between
    torch.testing.assert_close(torch.stack(list(state["recent"].values())), recent)
    torch.testing.assert_close(state["products"], recent @ recent.T)
    torch.testing.assert_close(state["evidence"], evidence + recent @ recent.T)


def test_a_client_alone_joins_whom_it_is_most_alike():
    """Seven and seven clients, and one that has a fifth of what the second seven have in common."""
    found = rows([0] * 7 + [1] * 7 + [2], noise=0.5)
    found[14] += 0.2 * (rows([1], noise=0.0)[0] - rows([0], noise=0.0)[0])
    report = FedPool().report(run([named(found)]))
    assert report["probability"] > 0.5 > report["no_groups"]
    assert sorted(map(sorted, report["groups"])) == [
        [f"c{k:02d}" for k in range(7)],
        [f"c{k:02d}" for k in range(7, 15)],
    ]


def test_where_most_are_alone_there_are_no_groups():
    alike = torch.eye(9, dtype=torch.float64)
    assert of_several(alike, torch.tensor([0, 0, 1, 1, 2, 3, 4, 5, 6])) == []
    assert of_several(alike, torch.tensor([0, 0, 1, 1, 2, 2, 3, 4, 5])) != []


def test_a_round_without_answers_changes_nothing():
    state = run([named(rows([0, 0], noise=1.0))])
    assert asyncio.run(FedPool().server_update(toy.server(), state, [])) is state


def test_a_newcomer_is_offered_the_model_of_all_and_those_of_the_groups():
    """Of two groups both; of clients in whom no group can be told, the model of all alone."""
    found = rows([0] * 4 + [1] * 4, noise=0.2)
    state = run([named(found)])
    of_all, *models = FedPool().pool(state)
    assert torch.equal(of_all.row, state["mean"].row)
    wanted = torch.stack([found[:4].mean(0), found[4:].mean(0)])
    torch.testing.assert_close(torch.stack(sorted((m.row for m in models), key=lambda row: float(row[0]))),
                               wanted[wanted[:, 0].argsort()])  # fmt: skip
    (model,) = FedPool().pool(run([named(found[:6])]))
    torch.testing.assert_close(model.row, found[:6].mean(0))


def test_a_state_of_the_first_version_is_refused():
    """It has no models of groups, so that neither a run nor `join` could go on from it."""
    with pytest.raises(UserError, match="begun with llm_fed 0.2.0"):
        FedPool().broadcast({"mean": State.of({"w": torch.zeros(1)}), "sums": {}, "partitions": []}, "a")
    with pytest.raises(UserError, match="begin a new run"):
        FedPool().pool({"mean": State.of({"w": torch.zeros(1)}), "sums": {}, "partitions": []})


def finished(held_out: list[int], best: float, *, steps: int = 20, private: bool = False) -> tuple[float, dict]:
    """What becomes of a pooled model at 0 at a client that trains towards 1, and whose held-out loss is lowest at
    `best`."""
    site = toy.clients(1)["c0"]
    site.data = replace(site.data, held_out=held_out)
    site.private = Private(1.0, 1.0, Secret.fresh()) if private else None
    site.begin(2, 0.1)
    site.alone = steps / site.local.steps

    async def losses_of(states, examples):
        assert examples == held_out
        return [float((state.row - best).square().mean()) for state in states]

    runtime, method = toy.ToyRuntime({"c0": 1.0}), FedPool()
    start = site.initial()
    pooled = start.like(torch.zeros_like(start.row))
    with patch.object(site, "losses_of", losses_of):
        assert runtime.run({"c0": method.finish(site, pooled)}) == {"c0": None}
    assert [count for count, _ in runtime.log] == ([steps] if steps else [])
    model = asyncio.run(method.personalize(site, pooled))
    return float(model.row.mean()), method.recipe(site)


@pytest.mark.parametrize("best, share", [(0.3, 0.3), (1.5, 1.0), (-1.0, 0.0)])
def test_as_much_of_the_own_model_as_held_out_examples_ask_for(best, share):
    found, recipe = finished([1, 2], best)
    assert found == pytest.approx(share, abs=1e-5) and recipe == {"own_share": share}


def test_without_held_out_examples_or_under_noise_half_of_it():
    for settings in ({"held_out": []}, {"held_out": [1, 2], "private": True}):
        found, recipe = finished(best=0.3, **settings)
        assert found == pytest.approx(0.5, abs=1e-5) and recipe == {"own_share": 0.5}


def test_without_steps_of_its_own_a_client_keeps_the_pooled_model():
    assert finished([1, 2], best=0.3, steps=0) == (0.0, {})
