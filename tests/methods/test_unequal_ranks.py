"""Clients whose adapters differ in rank: what each is sent, what is averaged, and numbers derived by hand."""

import asyncio
from dataclasses import replace

import pytest
import torch
import toy
from battery import OF_UNEQUAL

from llm_fed.engine.steps import Steps
from llm_fed.merge.factors import decomposed, rank_of
from llm_fed.merge.products import layers
from llm_fed.method import Upload
from llm_fed.method.optimizer import Optimizer, Tail
from llm_fed.method.requests import Fit
from llm_fed.methods.flexlora import FlexLoRA
from llm_fed.methods.hetlora import HetLoRA
from llm_fed.models.lora import Lora
from llm_fed.state import State
from llm_fed.testing import federation
from llm_fed.testing.battery import CHECKS, Slack
from llm_fed.testing.federation import ADAPTERS

RANKS = {"c0": 1, "c1": 2, "c2": 4}
UNEQUAL = replace(ADAPTERS, ranks=RANKS)
SETTINGS = {"local": {}, "hetlora": {"pruning": 0.0}, "flexlora": {}}
LORA = Lora(rank=2, alpha=4, dropout=0.0, target_modules=("q",))


def adapter(b: list[list[float]], a: list[list[float]]) -> State:
    numbers = {"q.lora_A": torch.tensor(a, dtype=torch.float64), "q.lora_B": torch.tensor(b, dtype=torch.float64)}
    return State.of(numbers)


def server_of(initial: State, ranks: dict[str, int]):
    server = toy.server()
    server.structure, server.draw = LORA, lambda generator: initial
    server.structures = {name: replace(LORA, rank=rank) for name, rank in ranks.items()}
    return server


def serve(method, server, *uploads: tuple[str, int, object]):
    state = method.init(server)
    answers = [Upload(name, examples, 0, content) for name, examples, content in uploads]
    return asyncio.run(method.server_update(server, state, answers))


def products(state: State, scaling: float) -> dict[str, torch.Tensor]:
    return {layer: scaling * state[b] @ state[a] for layer, a, b in layers(state)}


START = adapter([[1, 2], [3, 4]], [[1, 0, 0], [0, 1, 0]])


@pytest.fixture(scope="module", params=SETTINGS)
def whole(request, tmp_path_factory):
    settings = {"name": request.param, **SETTINGS[request.param]}
    return federation.go(settings, UNEQUAL, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("says", [*OF_UNEQUAL, "uploads look as upload_like says", "the loss falls"])
def test_the_battery_passes_with_unequal_ranks(whole, says, tmp_path):
    CHECKS[says](whole, tmp_path, Slack())


def test_each_client_trains_at_its_rank_and_from_what_it_was_sent(whole):
    personal, messages = whole.ask("personalize", whole.messages()), whole.messages()
    for name, rank in RANKS.items():
        assert rank_of(personal[name]) == rank and whole.clients[name].structure.rank == rank
        if messages[name] is not None:
            assert personal[name].equal(messages[name])
    (sizes,) = [{line["client"]: line["bytes_up"] for line in whole.records("client") if line["round"] == 1}]
    if messages["c0"] is not None:
        numbers = {name: 8 * messages[name].layout.size for name in RANKS}  # bytes of float64
        assert sizes["c2"] - sizes["c0"] == pytest.approx(numbers["c2"] - numbers["c0"], abs=64)


@pytest.mark.parametrize("method", [HetLoRA(), FlexLoRA()])
def test_clients_are_sent_the_first_components_in_their_scaling(method):
    """The server's scaling is 4 / 2 = 2, that of rank 1 is 4: what B has is halved, so that s B A stays."""
    server = server_of(START, {"small": 1, "large": 2})
    state = method.init(server)
    small, large = method.broadcast(state, "small"), method.broadcast(state, "large")
    assert small["q.lora_B"].tolist() == [[0.5], [1.5]] and small["q.lora_A"].tolist() == [[1, 0, 0]]
    assert large.equal(START)


def test_hetlora_pads_with_zeros_and_averages_factors():
    """By examples, 1 : 3. A = 1/4 [[4,0,0],[0,0,0]] + 3/4 [[0,0,4],[0,4,0]]; the small client's B counts twice in the
    server's scaling: B = 1/4 [[2,0],[4,0]] + 3/4 [[4,0],[0,4]]."""
    server = server_of(START, {"small": 1, "large": 2})
    small = {"adapter": adapter([[1], [2]], [[4, 0, 0]]), "rank": 1}
    large = {"adapter": adapter([[4, 0], [0, 4]], [[0, 0, 4], [0, 4, 0]]), "rank": 2}
    model = serve(HetLoRA(weights="examples"), server, ("small", 1, small), ("large", 3, large))["model"]
    assert model["q.lora_A"].tolist() == [[1, 0, 3], [0, 3, 0]]
    assert model["q.lora_B"].tolist() == [[3.5, 0], [1, 3]]


def test_hetlora_weighs_by_the_norms_of_products():
    """||B A|| in the server's scaling: 2 * 1 * 3 = 6 of the small client, 2 of the large one: 3/4 and 1/4."""
    server = server_of(START, {"small": 1, "large": 2})
    small = {"adapter": adapter([[1], [0]], [[3, 0, 0]]), "rank": 1}
    large = {"adapter": adapter([[0, 1], [0, 0]], [[5, 0, 0], [0, 2, 0]]), "rank": 2}
    model = serve(HetLoRA(), server, ("small", 9, small), ("large", 1, large))["model"]
    torch.testing.assert_close(model["q.lora_A"], torch.tensor([[3.5, 0, 0], [0, 0.5, 0]], dtype=torch.float64))
    torch.testing.assert_close(model["q.lora_B"], torch.tensor([[1.5, 0.25], [0, 0]], dtype=torch.float64))
    nothing = {"adapter": adapter([[0, 0], [0, 0]], [[1, 1, 1], [1, 1, 1]]), "rank": 2}
    alike = serve(HetLoRA(), server, ("large", 5, nothing))["model"]
    assert alike["q.lora_A"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_client_whose_tail_shrinks_prunes_itself_for_good(tmp_path):
    """Under a strong penalty. From then on it is sent and trains less, with the scaling that it had, so that its
    personal model is what it was sent. In round 1 B is zero, and so is every tail: it can but grow."""
    plain = ["local.optimizer=sgd", "local.lr=0.3", "local.lr_end=0.3"]
    run = federation.go({"name": "hetlora", "pruning": 2.0, "decay": 0.5}, UNEQUAL.training(plain), tmp_path)
    ranks = [line["ranks"] for line in run.records("server")]
    assert ranks == [RANKS, {"c0": 1, "c1": 1, "c2": 2}, {"c0": 1, "c1": 1, "c2": 1}]
    message = run.messages()["c2"]
    personal = run.ask("personalize", {**run.messages(), "c2": message})["c2"]
    assert rank_of(message) == ranks[-1]["c2"] and rank_of(personal) == 4
    structure = run.clients["c2"].structure
    of_message, of_personal = (products(state, structure.scaling) for state in (message, personal))
    for layer, product in of_message.items():
        torch.testing.assert_close(of_personal[layer], product)
    sizes = {line["round"]: line["bytes_down"] for line in run.records("client") if line["client"] == "c2"}
    assert sizes[1] == sizes[2] > sizes[3]


def test_the_penalty_of_the_tail_is_that_of_the_paper():
    """A gradient step of length 1 on lambda ||B[:, 1:]|| ||A[1:]|| alone, against autograd; B's first column stays."""
    start = adapter([[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]])
    optimizer = Optimizer(lr=1.0, name="sgd", tail=Tail(0.1, 1))
    values, grads = start.row.clone(), torch.zeros_like(start.row)
    Steps({0: Fit("", LORA, start, [], [[0]], optimizer)}, values[None], grads[None], start.layout).step([0])
    a, b = (start[name].clone().requires_grad_() for name in ("q.lora_A", "q.lora_B"))
    (0.1 * b[:, 1:].norm() * a[1:].norm()).backward()
    moved = start.like(values)
    torch.testing.assert_close(moved["q.lora_A"], (a - a.grad).detach())
    torch.testing.assert_close(moved["q.lora_B"], (b - b.grad).detach())
    assert torch.equal(moved["q.lora_B"][:, 0], start["q.lora_B"][:, 0])
    zero = 0.0 * start
    values, grads = zero.row.clone(), torch.zeros_like(zero.row)
    Steps({0: Fit("", LORA, zero, [], [[0]], optimizer)}, values[None], grads[None], start.layout).step([0])
    assert torch.equal(values, zero.row)


def test_flexlora_with_one_client_gives_back_its_product(tmp_path):
    server = server_of(START, {"small": 1, "large": 2})
    for name, sent in (("large", START), ("small", adapter([[1], [2]], [[4, 5, 6]]))):
        state = serve(FlexLoRA(), server, (name, 7, sent))
        again, scaling = FlexLoRA().broadcast(state, name), server.structures[name].scaling
        torch.testing.assert_close(products(again, scaling)["q"], products(sent, scaling)["q"], rtol=0, atol=1e-12)


def test_flexlora_sends_the_best_approximations_of_the_mean_product():
    """The products with their scalings 4 and 2 are [[0, 16, 0], [0, 0, 0]] and [[0, 0, 0], [0, 0, 12]]. Their mean by
    examples, 1 : 3, has the singular values 9 and 4; rank 1 keeps the first, and its B is that over the scaling."""
    server = server_of(START, {"small": 1, "large": 2})
    small, large = adapter([[1], [0]], [[0, 4, 0]]), adapter([[0, 0], [0, 3]], [[9, 9, 9], [0, 0, 2]])
    state = serve(FlexLoRA(), server, ("small", 1, small), ("large", 3, large))
    mean = torch.tensor([[0, 4, 0], [0, 0, 9]], dtype=torch.float64)
    torch.testing.assert_close(products(FlexLoRA().broadcast(state, "large"), 2)["q"], mean)
    first = torch.tensor([[0, 0, 0], [0, 0, 9]], dtype=torch.float64)
    torch.testing.assert_close(products(FlexLoRA().broadcast(state, "small"), 4)["q"], first)
    sent = FlexLoRA().broadcast(state, "small")
    torch.testing.assert_close(sent.row, torch.tensor([0, 0, 1, 0, 2.25], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("components, least", [(1, 1), (1, 3), (2, 2), (4, 2), (9, 3)])
def test_the_decomposition_is_that_of_the_product(components, least):
    generator = torch.Generator().manual_seed(components)
    b = torch.randn(5, components, generator=generator, dtype=torch.float64)
    a = torch.randn(components, 7, generator=generator, dtype=torch.float64)
    u, s, v = decomposed(b, a, least)
    torch.testing.assert_close((u * s) @ v, b @ a)
    assert len(s) >= min(least, 5) and bool((s.diff() <= 1e-12).all())
    torch.testing.assert_close(v @ v.T, torch.eye(len(v), dtype=torch.float64))
    torch.testing.assert_close(s[: min(5, components)], torch.linalg.svdvals(b @ a)[: min(5, components)])
