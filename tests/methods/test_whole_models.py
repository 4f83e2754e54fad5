"""FedMerge, IFCA, FedAvg+ and FedBN on whole image models: what they must equal, what travels, and their defaults."""

from typing import Any

import pytest
import tiny_images
import torch
from tiny_images import answer, assert_state, pictures
from tiny_rounds import LRS, TRAIN, base_of, batches, federate, personal, server_of, sites
from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.engine.engine import Engine
from llm_fed.experiment import run as experiment
from llm_fed.method import Upload
from llm_fed.methods.fedbn import FedBN
from llm_fed.methods.fedit import FedIT, FedLoRA
from llm_fed.methods.fedmerge import FedMerge, FedMergeFixed, coordinates, draw_soup
from llm_fed.methods.ifca import IFCA
from llm_fed.models.images import head_of
from llm_fed.models.structure import Full
from llm_fed.runs.reading import saved_config
from llm_fed.settings import configfile
from llm_fed.state import State, stack
from llm_fed.state.wire import pack

# FedMerge


def cluster(state: Any, j: int) -> State:
    return state["soup"][j]


@pytest.mark.parametrize("soup_init", ["independent", "scaled", "shared"])
def test_one_soup_model_is_fedavg(soup_init):
    base = base_of("resnet-9")
    average = federate(base, FedIT(), sites(base, FedIT()))
    for method in (FedMerge(num_models=1, soup_init=soup_init),
                   FedMergeFixed(num_models=1, models_per_client=1, soup_init=soup_init)):  # fmt: skip
        assert cluster(federate(base, method, sites(base, method)), 0).equal(average)


class OneHot(FedMergeFixed):
    """Client ck owns model k mod 2."""

    def weights(self, client: str) -> Tensor:
        return torch.eye(2, dtype=torch.float64)[int(client[1:]) % 2]


def test_one_hot_weights_are_fedavg_per_cluster():
    """Bit by bit, running statistics too."""
    base, method = base_of("resnet-9"), OneHot(num_models=2, models_per_client=1)
    train = {f"c{k}": pictures(4 + k, k) for k in range(4)}
    clients = sites(base, method, train=train)
    soup = method.init(server_of(base, method, clients))["soup"]
    state = federate(base, method, clients)
    for j in range(2):
        theirs = {name: examples for name, examples in train.items() if int(name[1:]) % 2 == j}
        assert cluster(state, j).equal(federate(base, FedIT(), sites(base, FedIT(), train=theirs), state=soup[j]))


def test_of_whole_models_the_head_decides_and_steps_have_a_fixed_length():
    """The defaults; updates of the body change the soup, but no weight."""
    base, method = base_of("resnet-9"), FedMerge(num_models=2)
    server = server_of(base, method, {})
    state = method.init(server)
    message = method.broadcast(state, "c0")
    head = [name for name in message if name.startswith("head.")]
    draws = torch.randn(message.layout.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def logits_after(change: State) -> Tensor:
        upload = Upload("c0", 3, 0, State(change.layout, change.row, message.extras))
        (row,) = answer(Engine(base), method.server_update(server, state, [upload]))["logits"].values()
        return row

    everything, zero = message.like(draws), message.like(torch.zeros_like(draws))
    assert logits_after(everything).abs().max() == pytest.approx(0.01)
    assert torch.equal(logits_after(everything), logits_after(zero.updated(everything.pick(head))))
    body = [name for name in message if name not in head]
    assert logits_after(zero.updated(everything.pick(body))).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["cnn", "cnn-5", "resnet-9", "resnet-50"])
def test_the_head_is_the_last_linear_layer(name):
    base = base_of(name)
    layout, head = base.layout(Full()), head_of(base.model)
    (weight, bias) = coordinates(layout, "head")
    assert (weight, bias) == (layout.slices[f"{head}.weight"], layout.slices[f"{head}.bias"])
    with pytest.raises(UserError, match="use head or all"):
        coordinates(base_of("cnn").layout(Full()), "last-layers")


def test_a_soup_of_whole_models_differs_in_what_is_drawn():
    """Scales and running statistics of BatchNorm are alike in all draws, and stay; everything else follows
    `soup_init`."""
    base = base_of("resnet-9")
    server = server_of(base, FedIT(), {})
    soups = {how: draw_soup(server, 4, how, 0.3) for how in ("independent", "scaled", "shared")}
    assert stack(FedMerge(num_models=4).init(server)["soup"]).equal(stack(soups["shared"]))
    for soup in soups.values():
        norms = [name for name in soup[0] if "stem.0.1" in name]
        assert len(norms) == 2
        for model in soup:
            assert model["stem.0.1.weight"].tolist() == [1] * 8 and model["stem.0.1.bias"].tolist() == [0] * 8
            assert all(torch.equal(value, soup[0].extras[key]) for key, value in model.extras.items())
    draws = [model["head.weight"] for model in soups["independent"]]
    assert not torch.equal(draws[0], draws[1])
    for j, (scaled, shared) in enumerate(zip(soups["scaled"], soups["shared"], strict=True)):
        assert torch.equal(scaled["head.weight"], 2 * draws[j])
        torch.testing.assert_close(shared["head.weight"], draws[0] + (0.3 * draws[j] if j else 0))


# IFCA and FedAvg+


def test_ifca_needs_no_warm_up_where_models_start_different():
    base, method = base_of("cnn"), IFCA(num_models=2, warmup_rounds=0)
    clients = sites(base, method)
    server, engine = server_of(base, method, clients), Engine(base)
    first = method.init(server)
    losses = {name: answer(engine, site.losses_of(first["models"])) for name, site in clients.items()}
    assert all(found[0] != found[1] for found in losses.values())
    state = federate(base, method, clients, rounds=1, state=first)
    assert state["chosen"] == {name: found.index(min(found)) for name, found in losses.items()}


def test_fine_tuning_of_a_whole_model_is_personal():
    """Its running statistics, too; who has not fine-tuned uses the model of all."""
    base, method = base_of("resnet-9"), FedLoRA(personal_lr=0.1)
    clients = sites(base, method)
    state = federate(base, method, clients)
    clients["c0"].begin(3, 0.02)
    clients["c0"].alone = 2 / clients["c0"].local.steps_on(clients["c0"].num_examples)
    answer(Engine(base), method.finish(clients["c0"], state))
    found = personal(base, method, clients["c0"], state)
    model = tiny_images.loaded(base, state).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clients["c0"].begin(3, 0.02)
    for inputs, labels, _ in batches(base, clients["c0"])[:2]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert_state(found, model.state_dict())
    assert not torch.equal(found.extras["stem.0.1.running_mean"], state.extras["stem.0.1.running_mean"])
    assert personal(base, method, clients["c1"], state).equal(state)


# FedBN: which layers stay with their client


METHOD = FedBN()


def normalising(module: nn.Module) -> set[str]:
    """The names of the parameters and floating buffers of BatchNorm layers."""
    return {
        f"{layer}.{name}"
        for layer, found in module.named_modules()
        if isinstance(found, nn.BatchNorm2d)
        for name in ("weight", "bias", "running_mean", "running_var")
    }


@pytest.mark.parametrize("make", [tiny_images.resnet, lambda: base_of("resnet-9"), lambda: base_of("resnet-50")])
def test_what_travels_has_no_batchnorm(make):
    base = make()
    sent = METHOD.broadcast(METHOD.init(server_of(base, METHOD, {})), "c0")
    assert not sent.extras
    assert set(sent) == {name for name, _ in base.model.named_parameters()} - normalising(base.model)
    assert 0 < len(pack(sent)) < len(pack(FedIT().init(server_of(base, FedIT(), {}))))


def test_two_rounds_by_hand():
    """A plain loop: each client's module lives on, and all but its BatchNorm is overwritten by the weighted mean."""
    base = base_of("resnet-9")
    clients = sites(base, METHOD)
    state = federate(base, METHOD, clients)
    own = normalising(base.model)
    start = clients["c0"].initial()
    modules = {name: tiny_images.loaded(base, start).train() for name in clients}
    for round, lr in enumerate(LRS, 1):
        for name, client in sites(base, METHOD).items():
            client.begin(round, lr)
            optimizer = torch.optim.SGD(modules[name].parameters(), lr=lr)
            for inputs, labels, _ in batches(base, client):
                optimizer.zero_grad()
                nn.functional.cross_entropy(modules[name](inputs), labels).backward()
                optimizer.step()
        trained = {name: dict(module.named_parameters()) for name, module in modules.items()}
        with torch.no_grad():
            for entry in set(trained["c0"]) - own:
                mean = sum(len(TRAIN[name]) * trained[name][entry] for name in clients) / sum(map(len, TRAIN.values()))
                for name in clients:
                    trained[name][entry].copy_(mean)
    for name, client in clients.items():
        found = personal(base, METHOD, client, state)
        assert_state(found, {k: v.detach() for k, v in modules[name].state_dict().items()})
    first, second = (personal(base, METHOD, client, state) for client in clients.values())
    assert not torch.equal(first["stem.0.1.weight"], second["stem.0.1.weight"])


def test_a_client_that_was_never_asked_has_fresh_layers():
    base = base_of("resnet-9")
    clients = sites(base, METHOD)
    state = federate(base, METHOD, {"c0": clients["c0"]})
    fresh, found = clients["c1"].initial(), personal(base, METHOD, clients["c1"], state)
    own = normalising(base.model)
    assert all(torch.equal(found[name], fresh[name] if name in own else state[name]) for name in found)
    assert all(torch.equal(found.extras[name], value) for name, value in fresh.extras.items())


def test_a_model_without_batchnorm_is_refused(tmp_path):
    """The same folder then takes the corrected run."""
    data = tiny_images.npz(tmp_path / "data.npz")

    def run(base: str) -> None:
        tree = tiny_images.tree(data, rounds=1, method={"name": "fedbn"}, base={"name": base, "dtype": "float32"})
        experiment.train(configfile.from_dict(tree), tmp_path / "run")

    with pytest.raises(UserError, match="BatchNorm with its client, but base.name is a model without it; choose one"):
        run("cnn")
    run("resnet-9")
    assert saved_config(tmp_path / "run")["base"]["name"] == "resnet-9"
    with pytest.raises(UserError, match="holds a run of another configuration"):
        run("cnn")


def test_a_resnet_can_be_trained_with_privacy(tmp_path):
    """FedAvg is refused: running statistics would travel without noise."""
    pytest.importorskip("dp_accounting")
    base, privacy = {"name": "resnet-9", "dtype": "float32"}, {"clip": 1.0, "noise": 0.1}
    data = tiny_images.npz(tmp_path / "data.npz")

    def run(method: str) -> None:
        tree = tiny_images.tree(data, rounds=1, method={"name": method}, base=base, privacy=privacy)
        experiment.train(configfile.from_dict(tree), tmp_path / method)

    with pytest.raises(UserError, match="running statistics"):
        run("fedit")
    run("fedbn")
    assert (tmp_path / "fedbn/summary.json").exists()
