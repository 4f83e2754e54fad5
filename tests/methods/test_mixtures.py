"""FedMoE, pFedMoE and FedEM on whole image models against plain PyTorch loops in float64; clients with little data."""

import copy
from typing import Any

import every
import pytest
import torch
from tiny_images import CLASSES, answer, assert_state, party, pictures
from tiny_rounds import LRS, SGD, base_of, batches, federate, personal, server_of, sites
from torch import Tensor, nn

from llm_fed import methods
from llm_fed.engine.engine import Engine
from llm_fed.kinds.images import Images
from llm_fed.method.site import Site
from llm_fed.methods.fedem import FedEM, expected_loss, posterior
from llm_fed.methods.fedmoe import FedMoE
from llm_fed.models.images import ARCHITECTURES
from llm_fed.models.joined import Answer, Gate
from llm_fed.state import State


def module_of(architecture: str, state: State, prefix: str) -> nn.Module:
    """A module of its own with the values below `prefix` in a state."""
    module = ARCHITECTURES[architecture](CLASSES).double()
    values = {**state.tensors(), **state.extras}
    own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    missing, unexpected = module.load_state_dict(own, strict=False)
    assert not unexpected and all("num_batches" in name for name in missing)
    return module


def values_of(**modules: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}


class PlainMoE:
    """Eq. 3-8 of the FedMoE paper as a plain loop over three modules."""

    def __init__(self, start: State, own: str, small: str, method: FedMoE):
        self.model, self.small = module_of(own, start, "own."), ARCHITECTURES[small](CLASSES).double()
        self.small.head = nn.Identity()
        self.features: list[Tensor] = []  # what the header reads
        self.model.head.register_forward_pre_hook(lambda header, inputs: self.features.append(inputs[0]))
        self.even = method.gate == "even"
        self.gate = Gate(3 * 32 * 32, method.gate_width).double()
        if not method.gate_norm:
            self.gate.norm2 = nn.Identity()
        weights = {name.removeprefix("gate."): value for name, value in start.tensors().items() if "gate." in name}
        self.gate.load_state_dict(weights, strict=False)

    def train(self, batches: Any, shared: dict[str, Tensor], lr: float, gate_lr: float) -> dict[str, Tensor]:
        self.small.load_state_dict(shared, strict=False)
        steps = [(self.model, lr), (self.small, lr), (self.gate, gate_lr)]
        optimizers = [torch.optim.SGD(module.parameters(), rate) for module, rate in steps]
        for module, _ in steps:
            module.train()
        for inputs, labels, _ in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            alpha = torch.full((len(inputs), 2), 0.5) if self.even else self.gate(inputs)
            self.model(inputs)
            mixed = alpha[:, :1] * self.features.pop() + alpha[:, 1:] * self.small(inputs)
            nn.functional.cross_entropy(
                nn.functional.linear(mixed, self.model.head.weight, self.model.head.bias), labels
            ).backward()
            for optimizer in optimizers:
                optimizer.step()
        return {name: value.clone() for name, value in self.small.state_dict().items()}


# FedMoE and pFedMoE


@pytest.mark.parametrize(
    "small, own, settings",
    [
        ("cnn", ("resnet-9", "cnn"), {"gate_lr": 0.2}),
        pytest.param("resnet-9", ("cnn",), {"gate_lr": 0.2}, marks=pytest.mark.slow),
        ("cnn", ("cnn",), {"gate_lr": 0.2, "gate_width": 5, "gate_norm": False}),
        ("cnn", ("cnn",), {"gate": "even"}),
    ],
)
def test_fedmoe_is_a_plain_loop(small, own, settings):
    """Two clients, two rounds: models with and without BatchNorm, the gate at a learning rate of its own that falls
    with the others', a last batch of one picture, and the small extractors averaged by numbers of examples."""
    base, method = base_of(small), FedMoE(**settings)
    clients = sites(base, method, own)
    first = method.init(server_of(base, method, clients))
    assert set(first.layout.names) == {n for n in first.layout.names if n.startswith("small.") and "head" not in n}
    shared = {name.removeprefix("small."): v for name, v in {**first.tensors(), **first.extras}.items()}
    plain = {
        name: PlainMoE(site.initial(), own[k % len(own)], small, method)
        for k, (name, site) in enumerate(clients.items())
    }
    for round, lr in enumerate(LRS, 1):
        found = {}
        for name, site in clients.items():
            site.begin(round, lr)
            found[name] = plain[name].train(batches(base, site), shared, lr, gate_lr=0.2 * lr / 0.05)
        shared = {key: (9 * found["c0"][key] + 5 * found["c1"][key]) / 14 for key in found["c0"]}
    state = federate(base, method, clients, state=first)
    assert_state(state, {f"small.{key}": value for key, value in shared.items()})
    for name, site in clients.items():
        gate = {} if method.gate == "even" else {"gate": plain[name].gate}
        expected = values_of(own=plain[name].model, small=plain[name].small, **gate)
        expected |= {f"small.{key}": value for key, value in shared.items()}
        assert_state(personal(base, method, site, state), expected)
        assert method.gate == "even" or float(plain[name].gate.norm.running_mean.abs().max()) > 1e-3


def test_pfedmoe_is_fedmoe_with_one_architecture():
    base = base_of("cnn")
    found = {}
    for method in (FedMoE(), methods.build({"name": "pfedmoe"})):
        clients = sites(base, method)
        state = federate(base, method, clients)
        found[method] = [state, *(personal(base, method, site, state) for site in clients.values())]
    for moe, pfed in zip(*found.values(), strict=True):
        assert torch.equal(moe.row, pfed.row) and len(moe.extras) == len(pfed.extras)
        assert [name.replace("own.", "local.").replace("small.", "global.") for name in moe] == list(pfed)


# FedEM


def plain_em(base: Images, site: Site, models: list[nn.Module], pi: Tensor, lr: float) -> Tensor:
    """One client's round by the formulas, each model on its own; pi afterwards."""
    inputs = base.prepare(torch.stack([picture.pixels for picture in site.train]))
    labels = [picture.label for picture in site.train]
    likelihood = torch.stack([m.eval()(inputs).softmax(1)[range(len(labels)), labels] for m in models], 1).detach()
    q = pi * likelihood  # exp(-loss) is the likelihood
    q /= q.sum(1, keepdim=True)
    for m, model in enumerate(models):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr)
        for x, y, places in batches(base, site):
            optimizer.zero_grad()
            each = nn.functional.cross_entropy(model(x), y, reduction="none")
            (sum(q[place, m] * each[n] for n, place in enumerate(places)) / len(places)).backward()
            optimizer.step()
    return q.mean(0)


@pytest.mark.parametrize("name", every.quick(["cnn", "resnet-9"], ["cnn"]))
def test_fedem_is_expectation_maximisation(name):
    """Two rounds of two clients and two models: the second E-step begins with the first one's weights."""
    base, method = base_of(name), FedEM(num_models=2)
    clients = sites(base, method)
    first = method.init(server_of(base, method, clients))
    means = [module_of(name, first, f"expert{m}.") for m in range(2)]
    assert not torch.equal(*(next(module.parameters()) for module in means))
    pi = {client: torch.full((2,), 0.5, dtype=torch.float64) for client in clients}
    for round, lr in enumerate(LRS, 1):
        found = {}
        for client, site in clients.items():
            site.begin(round, lr)
            found[client] = copy.deepcopy(means)
            pi[client] = plain_em(base, site, found[client], pi[client], lr)
        for m, model in enumerate(means):
            theirs = [found[client][m].state_dict() for client in clients]
            model.load_state_dict({key: (9 * theirs[0][key] + 5 * theirs[1][key]) / 14 for key in theirs[0]})
    state = federate(base, method, clients, state=first)
    expected = values_of(expert0=means[0], expert1=means[1])
    assert_state(state, expected)
    assert "weights" not in state.layout.names
    for client, site in clients.items():
        assert_state(personal(base, method, site, state), expected | {"weights": pi[client]})
        assert abs(float(pi[client][0]) - 0.5) > 1e-4
    stranger = party(base, pictures(3), "c9", clients["c0"].structure, SGD)
    mixed = personal(base, method, stranger, state)
    assert mixed["weights"].tolist() == [0.5, 0.5]
    images = pictures(6, 7)
    inputs = base.prepare(torch.stack([picture.pixels for picture in images]))
    each = torch.stack([model.eval()(inputs).softmax(1) for model in means], -1).detach()
    for weights in torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64):
        asked = mixed.updated(State.of({"weights": weights}))
        said = answer(Engine(base), stranger.answers(asked, images)).logits.softmax(1)
        torch.testing.assert_close(said, each @ weights, rtol=0, atol=1e-12)


def test_the_steps_of_em_do_not_train_the_responsibilities():
    """By hand: likelihoods 0.8 and 0.2 of the label, pi = (1/4, 3/4): q = (0.2, 0.15) / 0.35 = (4/7, 3/7). The gradient
    of the M-step's loss by model m's logits is q_m (softmax - onehot)."""
    logits = [torch.tensor([[0.8, 0.2]]).double().log(), torch.tensor([[0.2, 0.8]]).double().log()]
    parts = {str(m): Answer(value.requires_grad_(), value) for m, value in enumerate(logits)}
    joint, labels = Answer(logits[0], logits[0], parts), torch.tensor([0])
    q = posterior(joint, labels, torch.tensor([0.25, 0.75]).double()).detach()
    assert q.tolist() == [[pytest.approx(4 / 7), pytest.approx(3 / 7)]]
    whole = torch.cat([torch.full((2, 2), 9.0), q])  # the picture is the third of the training examples
    expected_loss(whole, joint, labels, torch.tensor([2])).backward()
    assert logits[0].grad.tolist() == [[pytest.approx(-0.2 * 4 / 7), pytest.approx(0.2 * 4 / 7)]]
    assert logits[1].grad.tolist() == [[pytest.approx(-0.8 * 3 / 7), pytest.approx(0.8 * 3 / 7)]]


# Little data


@pytest.mark.parametrize("name", every.quick(["fedmoe", "pfedmoe", "fedem", "fedmerge", "ifca", "fedavg+"], ["fedmoe"]))
def test_one_class_a_class_of_ones_own_and_one_picture(name):
    """c0 alone has class 3, and no other; c1 has a single picture; so has the last batch of c0."""
    base, method = base_of("resnet-9"), methods.build({"name": name})
    fours, others = [p for p in pictures(20) if p.label == 3], [p for p in pictures(9) if p.label != 3]
    train = {"c0": fours[:5], "c1": others[:1], "c2": others[1:]}
    clients = sites(base, method, train=train)
    state = federate(base, method, clients)
    for site in clients.values():
        found = personal(base, method, site, state)
        assert found.is_finite() and all(bool(value.isfinite().all()) for value in found.extras.values())
        said = answer(Engine(base), site.answers(found, fours + others)).logits
        assert said.shape == (len(fours + others), CLASSES) and bool(said.isfinite().all())
