"""FedBN: which layers stay with their client, what travels, and two rounds by hand."""

import pytest
import tiny_images
import torch
from tiny_images import assert_state
from tiny_rounds import LRS, TRAIN, base_of, batches, federate, personal, server_of, sites
from torch import nn

from llm_fed.basics.errors import UserError
from llm_fed.experiment import run as experiment
from llm_fed.methods.fedbn import FedBN
from llm_fed.methods.fedit import FedIT
from llm_fed.runs.reading import saved_config
from llm_fed.settings import configfile
from llm_fed.state.wire import pack

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
