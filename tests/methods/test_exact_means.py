"""FLoRA and FedEx-LoRA: what is added to the base for all clients is exactly what the mean of products needs."""

import asyncio
from dataclasses import replace

import pytest
import torch
import toy
from battery import OF_UNEQUAL

from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdapterBank
from llm_fed.federation.schedule import Delayed
from llm_fed.merge import delta
from llm_fed.merge.factors import rank_of
from llm_fed.merge.products import layers
from llm_fed.method import Upload
from llm_fed.methods.fedex_lora import FedExLoRA
from llm_fed.methods.flora import FLoRA
from llm_fed.models.lora import Lora
from llm_fed.state import State
from llm_fed.state.wire import pack
from llm_fed.testing import federation, tiny
from llm_fed.testing.battery import CHECKS, Slack
from llm_fed.testing.federation import STRUCTURE, language_base

LORA = Lora(rank=2, alpha=6, dropout=0.0, target_modules=("q",))  # s = 3
UNEQUAL = replace(federation.ADAPTERS, ranks={"c0": 1, "c1": 2, "c2": 4})
SIDES = (9, 7)  # out, in


def adapter(rank: int, seed: int) -> State:
    draws = torch.Generator().manual_seed(seed)
    shapes = {"q.lora_A": (rank, SIDES[1]), "q.lora_B": (SIDES[0], rank)}
    return State.of({name: torch.randn(shape, generator=draws) for name, shape in shapes.items()})


def server_of(ranks: dict[str, int]):
    server = toy.server()
    server.structure, server.draw = LORA, lambda generator: adapter(2, 0)
    if set(ranks.values()) != {2}:
        server.structures = {name: replace(LORA, rank=rank) for name, rank in ranks.items()}
    return server


def upload(name: str, examples: int, state: State, version: int = 0) -> Upload:
    return Upload(name, examples, 0, {"version": version, "adapter": state})


def serve(method, server, state, *uploads: Upload):
    return asyncio.run(method.server_update(server, state, list(uploads)))


def product(state: State, scaling: float) -> torch.Tensor:
    return scaling * state["q.lora_B"].double() @ state["q.lora_A"].double()


def of_delta(found: State) -> torch.Tensor:
    """What a delta adds to the layer."""
    if "q.weight" in found.layout.slices:
        return found["q.weight"].double()
    return product(found, 1.0) if len(found) else torch.zeros(SIDES, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [{"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 2, "c": 4}])
def test_flora_adds_the_exact_mean_of_the_products(ranks):
    """sum_k n_k / n s_k B_k A_k with s = 6 / r, twice; the second stack makes the factors larger than the layer."""
    server, expected = server_of(ranks), torch.zeros(SIDES, dtype=torch.float64)
    method = FLoRA()
    state = method.init(server)
    for version in range(2):
        sent = {name: adapter(rank, 10 * version + n) for n, (name, rank) in enumerate(ranks.items())}
        answers = [upload(name, n + 1, one, version) for n, (name, one) in enumerate(sent.items())]
        state = serve(method, server, state, *answers)
        expected += sum((n + 1) / 6 * product(one, 6 / ranks[name]) for n, (name, one) in enumerate(sent.items()))
        torch.testing.assert_close(of_delta(state["delta"]), expected, rtol=0, atol=1e-5)
    assert list(state["delta"]) == ["q.weight"] and state["delta"]["q.weight"].shape == SIDES


def test_fedex_adds_what_the_product_of_the_means_lacks():
    """s B A + residual = s sum_k n_k / n B_k A_k, and the residual of two clients has rank r."""
    server, method = server_of({"a": 2, "b": 2}), FedExLoRA()
    first, second = adapter(2, 1), adapter(2, 2)
    state = serve(method, server, method.init(server), upload("a", 1, first), upload("b", 3, second))
    mean = (product(first, 3) + 3 * product(second, 3)) / 4
    torch.testing.assert_close(product(state["model"], 3) + of_delta(state["delta"]), mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(state["model"].row, (first.row + 3 * second.row) / 4)
    assert state["delta"]["q.lora_A"].shape == (2, 7)
    third = serve(method, server, state, *(upload(n, 1, adapter(2, k), 1) for k, n in enumerate("abc")))
    mean = sum(product(adapter(2, k), 3) for k in range(3)) / 3 + of_delta(state["delta"])
    torch.testing.assert_close(product(third["model"], 3) + of_delta(third["delta"]), mean, rtol=0, atol=1e-5)


def test_the_stack_grows_with_the_cohort_and_the_residual_travels_in_the_smaller_form():
    """Numbers: a stack of K adapters of rank 2 has 2 K (9 + 7); a residual 2 (K - 1) (9 + 7), or 9 * 7 where that is
    not less, from K = 3 on."""
    numbers = {}
    for count in (1, 2, 3):
        names = "abc"[:count]
        server = server_of(dict.fromkeys(names, 2))
        for method in (FLoRA(), FedExLoRA()):
            answers = [upload(name, 1, adapter(2, k)) for k, name in enumerate(names)]
            state = serve(method, server, method.init(server), *answers)
            message = method.broadcast(state, "a")
            assert message["whole"] is False or count == 0
            numbers[type(method), count] = message["delta"].layout.size
            rest = {**message, "delta": None}
            assert len(pack(message)) - len(pack(rest)) == pytest.approx(4 * message["delta"].layout.size, abs=400)
    assert [numbers[FLoRA, count] for count in (1, 2, 3)] == [32, 63, 63]
    assert [numbers[FedExLoRA, count] for count in (1, 2, 3)] == [0, 32, 63]


@pytest.mark.parametrize("method", [FLoRA(), FedExLoRA()])
def test_who_missed_a_step_is_sent_the_whole(method):
    server = server_of({"a": 2, "b": 2})
    state = serve(method, server, method.init(server), upload("a", 1, adapter(2, 1)), upload("b", 1, adapter(2, 2)))
    assert not method.broadcast(state, "a")["whole"] and method.broadcast(state, "new")["whole"]
    state = serve(method, server, state, upload("a", 1, adapter(2, 3), 1))
    assert not method.broadcast(state, "a")["whole"]
    assert method.broadcast(state, "b")["whole"]
    assert torch.equal(method.broadcast(state, "b")["delta"].row, state["delta"].row)


@pytest.fixture(scope="module", params=["flora", "fedex-lora"])
def whole(request, tmp_path_factory):
    setup = UNEQUAL if request.param == "flora" else federation.ADAPTERS
    return federation.go({"name": request.param}, setup, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("says", OF_UNEQUAL)
def test_the_battery_passes_with_unequal_ranks(whole, says, tmp_path):
    CHECKS[says](whole, tmp_path, Slack())


@pytest.mark.parametrize("name", ["flora", "fedex-lora"])
def test_late_and_missing_answers_leave_all_clients_with_the_servers_delta(name, tmp_path):
    setup = UNEQUAL if name == "flora" else federation.ADAPTERS
    late = Delayed(tuple(federation.SIZES), 0.7, 1, sigma=1.0, drop_out=0.3)
    run = federation.go({"name": name}, setup, tmp_path, schedule=late, rounds=6)
    assert len({line["staleness"] for line in run.records("client")}) > 1 and run.state["version"] < 6
    for state in run.ask("personalize", run.messages()).values():
        for layer, parts in delta.under(state).items():
            for part, value in parts.items():
                torch.testing.assert_close(value, run.state["delta"][f"{layer}.{part}"], rtol=0, atol=1e-12)


def _joined(state: State, structure: Lora) -> tuple[State, Lora]:
    one = delta.joined(state, structure.scaling)
    return one, replace(structure, delta=False, rank=rank_of(one), alpha=structure.scaling * rank_of(one))


def test_joined_and_apart_again_compute_the_same(whole):
    """The adapter that is exported, on stock layers, is what the engine computes with the delta beneath."""
    base, structure = language_base(), whole.clients["c1"].structure
    state = whole.ask("personalize", whole.messages())["c1"]
    one, of_one = _joined(state, structure)
    again = delta.apart(one, of_one.scaling, state.layout)
    tokens = torch.tensor([tiny.answers(1, 1)[0].input_ids])
    bare, logits = State(state.layout, state.row), []  # bare of its delta
    for its_structure, its in ((structure, state), (of_one, one), (structure, again), (structure, bare)):
        bank = AdapterBank(base.model, its_structure, 1, torch.float64)
        bank.load(0, its)
        with torch.no_grad(), bank.attached(torch.zeros(1, dtype=torch.int64)):
            logits.append(base.model(tokens).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(logits[0], logits[2], rtol=0, atol=1e-10)
    assert float((logits[0] - logits[3]).abs().max()) > 1e-3
    assert of_one.scaling == pytest.approx(structure.scaling) and not of_one.delta and rank_of(one) == of_one.rank


def test_rows_with_different_deltas_or_none_do_not_feel_each_other():
    base = language_base()
    plain = federation.fresh(base, STRUCTURE, torch.float64, torch.Generator().manual_seed(3))
    plain = plain.like(torch.randn(plain.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(4)))
    factored = delta.of_pairs({layer: (plain[b], plain[a]) for layer, a, b in layers(plain)}, plain)
    layer, a, b = next(layers(plain))
    dense = State.of({f"{layer}.weight": plain[b] @ plain[a]})
    states = [plain, delta.beneath(plain, factored), delta.beneath(plain, dense), delta.beneath(plain, factored)]
    index, tokens = torch.tensor([1, 0, 2, 3, 1]), torch.tensor([[5, 9, 12, 30]] * 5)
    bank = AdapterBank(base.model, STRUCTURE, 4, torch.float64)
    for k, state in enumerate(states):
        bank.load(k, state)
    with torch.no_grad(), bank.attached(index):
        together = base.model(tokens).logits
    for row, k in enumerate(index.tolist()):
        one, of_one = _joined(states[k], STRUCTURE)
        alone = AdapterBank(base.model, of_one, 1, torch.float64)
        alone.load(0, one)
        with torch.no_grad(), alone.attached(torch.zeros(1, dtype=torch.int64)):
            torch.testing.assert_close(base.model(tokens[:1]).logits[0], together[row], rtol=0, atol=1e-9)
    assert not torch.equal(together[0], together[1]) and torch.equal(together[0], together[3])
    bank.load(1, plain)
    with torch.no_grad(), bank.attached(index):
        torch.testing.assert_close(base.model(tokens).logits[0], together[1])


def test_a_dense_delta_is_exported_at_its_own_rank():
    draws = torch.Generator().manual_seed(0)
    low = torch.randn(9, 3, generator=draws) @ torch.randn(3, 7, generator=draws)
    zero = adapter(2, 0) * 0.0
    one, structure = _joined(delta.beneath(zero, State.of({"q.weight": low})), replace(LORA, delta=True))
    assert structure.rank == 3
    torch.testing.assert_close(product(one, structure.scaling).float(), low, rtol=0, atol=1e-5)


def test_flora_starts_from_an_adapter_by_adding_it_to_the_base():
    server = server_of({"a": 2})
    server.start = adapter(2, 9)
    state = FLoRA().init(server)
    torch.testing.assert_close(of_delta(state["delta"]), product(server.start, 3), rtol=0, atol=1e-5)
    assert FLoRA().broadcast(state, "a")["whole"]


def test_clients_of_flora_draw_adapters_of_their_own_each_round(tmp_path):
    """A is as it was drawn, since B alone is trained."""
    run = federation.go({"name": "flora"}, federation.ADAPTERS.training(["local.freeze=lora_A$"]), tmp_path)
    drawn = {upload.client: upload.content["adapter"].select("lora_A$").row for upload in run.uploads()}
    again = {upload.client: upload.content["adapter"].select("lora_A$").row for upload in run.uploads()}
    for name, row in drawn.items():
        assert torch.equal(row, again[name])
        others = [other for client, other in drawn.items() if client != name]
        assert not any(torch.equal(row, other) for other in others)
        earlier = run.clients[name].draw(generator(0, "fresh", 1, name)).select("lora_A$").row
        assert not torch.equal(row, earlier)
