"""Models that teach each other: FML, FedKD and FedAPEN against plain loops; mistakes in all such methods."""

from typing import Any

import pytest
import torch
import toy
from server_steps import serve
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax
from unlike import LR, PICTURES, C, Federation, H, assert_entries, of_classes, seen

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.methods.fedapen import FedAPEN, learned_weight
from llm_fed.methods.fedkd import FedKD
from llm_fed.methods.fml import FML
from llm_fed.models.joined import Answer
from llm_fed.state import State
from llm_fed.state.wire import pack


def kl(teacher: Tensor, taught: Tensor) -> Tensor:
    """sum over classes of p log(p / q), mean over images."""
    p, q = softmax(teacher, 1), softmax(taught, 1)
    return (p * (p / q).log()).sum(1).mean()


def fml_losses(own: tuple[Tensor, Tensor], small: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """alpha = 0.3, beta = 0.8. The losses of both; whatever a model's loss says of the other one is no gradient."""
    return (
        0.3 * cross_entropy(own[0], labels) + 0.7 * kl(small[0], own[0]),
        0.8 * cross_entropy(small[0], labels) + 0.2 * kl(own[0], small[0]),
    )


def fedkd_losses(own: tuple[Tensor, Tensor], small: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    one, two = cross_entropy(own[0], labels), cross_entropy(small[0], labels)
    divisor = (one + two).item()
    hidden = ((own[1] - small[1]) ** 2).sum() / own[1].numel()
    return one + (kl(small[0], own[0]) + hidden) / divisor, two + (kl(own[0], small[0]) + hidden) / divisor


def fedapen_losses(weight: float) -> Any:
    def losses(own: tuple[Tensor, Tensor], small: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        together = cross_entropy(weight * own[0] + (1 - weight) * small[0], labels)
        return (
            cross_entropy(own[0], labels) + kl(small[0], own[0]) + together,
            cross_entropy(small[0], labels) + kl(own[0], small[0]) + together,
        )

    return losses


def trained_in_turn(run: Federation, own: nn.Module, small: nn.Module, batches: Any, losses: Any) -> None:
    """Each model has an optimizer, and a gradient of its own loss by its own parameters alone: no teacher can learn."""
    optimizers = [torch.optim.Adam(model.parameters(), lr=LR) for model in (own, small)]
    for inputs, labels in batches:
        found = losses(seen(own, inputs), seen(small, inputs), labels)
        for model, loss in zip((own, small), found, strict=True):
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("architecture", ["", "resnet-9"])
@pytest.mark.parametrize(
    "method, losses", [(FML(alpha=0.3, beta=0.8), fml_losses), (FedKD(energy=1, energy_end=1), fedkd_losses)]
)
def test_mutual_learning_is_a_plain_loop(method, losses, architecture):
    """Five pictures in batches of four: every other batch is a single one. ResNet-9 has running statistics."""
    run = Federation(method, of_classes(0, 1, 1, 3, 0), architectures=[architecture])
    start = run.clients["c0"].initial()
    sent = run.message("c0") if isinstance(method, FML) else run.message("c0")["model"]
    own, small = run.module(architecture, start, "own."), run.module("", sent, "small.")
    (upload,) = run.ask(1)
    trained_in_turn(run, own, small, run.batches("c0", run.clients["c0"].train), losses)
    update = upload.content if isinstance(method, FML) else upload.content["update"]
    assert_entries(sent + update, small, "small.")
    assert_entries(run.clients["c0"].memory["own"], own, "own.")
    assert (update.row.abs() > LR / 2).sum() > 1000


def test_fedkd_divides_by_a_constant_that_is_not_too_small():
    """On examples known by heart by 0.01; the gradient of a model's features is that of the distance alone."""
    labels = torch.tensor([0, 2])
    tensors = [torch.randn(2, n, dtype=torch.float64).requires_grad_() for n in (C, H, C, H)]
    known = 40 * nn.functional.one_hot(labels, C) + torch.tensor([0.0, 3.0, 0.0, 1.0])
    own = Answer(tensors[0] + known, tensors[1])
    small = Answer(tensors[2] + known, tensors[3])
    FedKD().loss(Answer(own.logits, own.features, {"own": own, "small": small}), labels, labels).backward()
    assert cross_entropy(own.logits, labels) + cross_entropy(small.logits, labels) < 1e-6
    hidden = 2 * (own.features - small.features) / own.features.numel() / 0.01
    torch.testing.assert_close(tensors[1].grad, hidden, rtol=1e-12, atol=0)
    torch.testing.assert_close(tensors[3].grad, -hidden, rtol=1e-12, atol=0)


def test_fedapen_is_a_plain_loop():
    """Of six examples one is held out: lambda is learned on it, both models on the five others."""
    method = FedAPEN(adaptability=0.2, weight_lr=0.3, weight_epochs=10)
    run = Federation(method, of_classes(0, 1, 1, 3, 0, 2), architectures=["resnet-9"])
    client, sent = run.clients["c0"], run.message("c0")
    held, rest = method.divided(client)
    assert len(held) == 1 and len(rest) == 5 and {id(p) for p in held + rest} == {id(p) for p in client.train}
    own, small = run.module("resnet-9", client.initial(), "own."), run.module("", sent, "small.")
    (upload,) = run.ask(1)
    inputs, labels = run.tensors(held)
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([weight], lr=0.3)
    with torch.no_grad():
        logits = own.eval()(inputs), small.eval()(inputs)
    for _ in range(10):
        sgd.zero_grad()
        cross_entropy(weight * logits[0] + (1 - weight) * logits[1], labels).backward()
        sgd.step()
        weight.data.clamp_(0, 1)
    found = client.memory["own"]["weights"]
    torch.testing.assert_close(found, torch.stack([weight, 1 - weight]).detach(), rtol=0, atol=1e-6)
    assert abs(weight.item() - 0.5) > 0.01
    trained_in_turn(run, own.train(), small.train(), run.batches("c0", rest), fedapen_losses(float(found[0])))
    assert_entries(sent + upload.content, small, "small.")
    assert_entries(client.memory["own"], own, "own.")


def test_fedapen_learns_its_weight_in_the_gradients_direction_and_within_bounds():
    own, small = torch.randn(2, 7, C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(7) % C
    right = own + 5 * nn.functional.one_hot(labels, C)
    options: Any = {"lr": 0.1, "batch_size": 3}
    assert learned_weight(0.5, right, small, labels, epochs=100, **options) > 0.9
    assert learned_weight(0.5, small, right, labels, epochs=100, **options) < 0.1
    assert learned_weight(0.5, right, small, labels, epochs=9, lr=900.0, batch_size=3) == 1
    assert learned_weight(0.5, small, right, labels, epochs=9, lr=900.0, batch_size=3) == 0
    assert learned_weight(0.5, right, small, labels, epochs=0, **options) == 0.5
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for chosen in (slice(0, 3), slice(3, 6), slice(6, 7)):
        loss = cross_entropy(weight * own[chosen] + (1 - weight) * small[chosen], labels[chosen])
        weight.data -= 0.1 * torch.autograd.grad(loss, weight)[0]
    assert learned_weight(0.3, own, small, labels, epochs=1, **options) == pytest.approx(weight.item(), abs=1e-14)


def test_fedapen_classifies_by_the_weighed_sum_and_goes_on_from_its_weight():
    """What it is scored with is where the next round's training begins, and scoring leaves no trace."""
    method = FedAPEN(weight_lr=0.2)
    run = Federation(method, of_classes(0, 1, 1, 3), of_classes(2, 3, 2))
    run.round(1)
    before = pack(dict(run.clients["c0"].memory))
    personal = run.personal("c0")
    weight = float(personal["weights"][0])
    assert pack(dict(run.clients["c0"].memory)) == before and weight not in (0.5, 0.0, 1.0)
    assert float(run.clients["c0"].memory["own"]["weights"][0]) != weight
    found = run.answers("c0", personal, PICTURES[:5])
    expected = weight * found.parts["own"].logits + (1 - weight) * found.parts["small"].logits
    torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-12)
    run.do(method.finish(run.clients["c0"], run.message("c0")))
    assert method.recipe(run.clients["c0"]) == {"weight_of_own": round(weight, 4)}
    run.round(2)
    assert float(run.clients["c0"].memory["own"]["weights"][0]) == weight


def test_fedapen_holds_one_of_two_examples_out_but_never_the_only_one():
    run = Federation(FedAPEN(weight_lr=1.0), of_classes(1), of_classes(1, 2))
    method = run.method
    assert isinstance(method, FedAPEN)
    assert [len(method.divided(client)[0]) for client in run.clients.values()] == [0, 1]
    run.round(1)
    assert run.personal("c0")["weights"].tolist() == [0.5, 0.5]
    assert run.personal("c1")["weights"].tolist() != [0.5, 0.5]


@pytest.mark.parametrize("name", ["fml", "fedkd", "fedapen", "lg-fedavg"])
def test_the_mean_is_weighed_by_numbers_of_examples(name):
    method = methods.build({"name": name, **({"energy": 1, "energy_end": 1} if name == "fedkd" else {})})
    run = Federation(method, of_classes(0), of_classes(1, 2, 3), architectures=["", "resnet-9"])
    before = run.state["model"] if name == "fedkd" else run.state
    contents = [upload.content for upload in run.round(1)]
    one, two = [content["update"] if name == "fedkd" else content for content in contents]
    after = run.state["model"] if name == "fedkd" else run.state
    torch.testing.assert_close(after.row, before.row + one.row / 4 + two.row * 3 / 4, rtol=0, atol=1e-14)
    for client, personal in ((client, run.personal(client)) for client in run.clients):
        assert {entry.split(".")[0] for entry in after} == {"head" if name == "lg-fedavg" else "small"}
        for entry in after:
            assert torch.equal(personal[entry], after[entry])
        for entry, value in run.clients[client].memory["own"].tensors().items():
            assert entry == "weights" or torch.equal(personal[entry], value)
        assert len(run.clients[client].memory["own"]) + len(after) == len(personal)


def test_fedkd_moves_running_statistics_to_the_clients_mean():
    """From 0.4 to 0.2, whatever the clients were sent; the step, which travels, is the change."""

    def sent(variance: float) -> State:
        return State.of({"x": torch.tensor([1.0])}, {"running_var": torch.tensor([variance])})

    state = {"model": sent(0.4), "version": 3, "step": None, "holds": {}}
    updates = [{"version": version, "update": sent(variance)} for version, variance in ((3, 0.1), (1, 0.3))]
    after = serve(FedKD(), toy.server(), state, *updates)
    assert after["model"].extras["running_var"].item() == pytest.approx(0.2)
    assert after["step"].extras["running_var"].item() == pytest.approx(-0.2)
    assert after["model"].row.item() == 2.0


# Mistakes


@pytest.mark.parametrize("name", ["lg-fedavg", "fedproto", "fedkd"])
def test_features_must_be_as_many(name):
    run = Federation(methods.build({"name": name}), of_classes(0, 1), architectures=["cnn-5"])
    with pytest.raises(UserError, match="500.*64.*choose (other models in )?base.name and base.clients"):
        run.ask(1)
