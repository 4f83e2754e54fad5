"""Whole runs whose clients have ranks of their own: what is exported, what stock PEFT makes of it, and mistakes."""

import json
from pathlib import Path

import every
import peft
import pytest
import torch
from network import federate
from safetensors.torch import load_file
from small_run import CLIENTS
from transformers import AutoModelForCausalLM

from llm_fed import load_client
from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.commands.evaluate import evaluate_run
from llm_fed.experiment import announce
from llm_fed.experiment import run as experiment
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State

RANKS = {"ada": 1, "bob": 2, "cyd": 3}
METHODS = ["local", "hetlora", "flexlora", "flora", "fedex-lora"]
EQUAL = {"fedex-lora"}  # where all clients need one rank


def tree(small, method: str, **changes):
    rank = 2 if method in EQUAL else RANKS
    return small.tree(method={"name": method}, **{"adapter": {"rank": rank}, "rounds": 2, **changes})


@pytest.fixture(scope="module", params=every.quick(METHODS, ["hetlora", "flora"]))
def run(request, small, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    experiment.train(from_dict(tree(small, request.param)), folder)
    return request.param, folder


def test_what_is_exported_scores_as_the_run_did(run):
    _, folder = run
    assert (
        evaluate_run(folder)["scores"]["clients"]
        == json.loads((folder / "summary.json").read_text())["scores"]["clients"]
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_stock_peft_computes_the_same(run, small, client):
    """With the client's own rank and scaling: alpha 8 over rank 1, 2 and 3. Two stacks of FLoRA have rank 6 each, and
    the scaling of the client's adapters; two residuals of FedEx-LoRA have rank 4 each, beside the adapter's 2."""
    method, folder = run
    written = json.loads((folder / "adapters" / client / "adapter_config.json").read_text())
    rank = {"flora": 12, "fedex-lora": 10}.get(method, RANKS[client])
    scaling = 8 / (2 if method in EQUAL else RANKS[client])
    assert (written["r"], written["lora_alpha"]) == (rank, pytest.approx(scaling * rank))
    tokens = torch.tensor([[5, 9, 12, 30]])
    model = AutoModelForCausalLM.from_pretrained(small.base).eval()
    bare = model(tokens).logits
    theirs = peft.PeftModel.from_pretrained(model, folder / "adapters" / client)(tokens).logits
    ours = load_client(folder / "adapters" / client, str(small.base))
    bank = ours.base.bank(ours.structure, ours.state)
    with torch.no_grad(), bank.attached(torch.zeros(1, dtype=torch.int64)):
        found = ours.base.model(tokens).logits
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)
    assert float((found - bare).detach().abs().max()) > 1e-3


def test_a_machine_of_a_network_trains_its_client_at_its_rank(run, small, tmp_path):
    """The numbers are those of one process, also where the server alone knows the other ranks."""
    method, folder = run
    _, there = federate(tmp_path, small, tree(small, method))
    here = json.loads((folder / "summary.json").read_text())["scores"]
    assert there["scores"]["clients"] == here["clients"]
    for client in CLIENTS:
        mine = load_file(folder / "adapters" / client / "adapter_model.safetensors")
        theirs = load_file(tmp_path / f"home-{client}/adapters/run" / client / "adapter_model.safetensors")
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            torch.testing.assert_close(values, theirs[name], rtol=1e-4, atol=1e-5)


def test_a_list_goes_by_the_clients_order(small):
    config = from_dict(tree(small, "hetlora", adapter={"rank": [1, 2, 3]}))
    built = build.prepare(config, Reporter())
    assert {id: site.structure.rank for id, site in built.clients.items()} == RANKS
    assert built.server.structure.rank == 3 and built.server.structures["bob"] == built.clients["bob"].structure
    assert "of ranks 1 to 3 on" in announce.run_plan(built).lines["training"]
    states = [site.initial() for site in built.clients.values()]
    assert all(isinstance(state, State) for state in states) and len({state.layout.size for state in states}) == 3


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("hetlora", {"adapter": {"rank": [1, 2]}}, r"has 2 ranks, one for each client in their order; the 3 clients "),
        (
            "hetlora",
            {"adapter": {"rank": {**RANKS, "dan": 2}}},
            r"names 'dan', which is no client.*the 3 clients are ada",
        ),
        ("hetlora", {"adapter": {"rank": {"ada": 1}}}, r"names no rank of bob, cyd; the 3 clients are ada, bob, cyd"),
        ("hetlora", {"adapter": {"rank": []}}, r"adapter.rank has 0 ranks"),
        ("hetlora", {"adapter": {"rank": [1, 2, 0]}}, r"adapter.rank is 0; it must be at least 1"),
        ("hetlora", {"adapter": {"rank": [1, 2, "x"]}}, r"adapter.rank is .*; it takes"),
        (
            "hetlora",
            {"adapter": {"rank": RANKS, "start": "runs/x"}},
            r"adapter.start gives all clients the same adapter",
        ),
        (
            "fedit",
            {},
            r"fedit needs the same rank at all of them; give one number, or choose local, hetlora, flexlora, flora",
        ),
        ("fedex-lora", {"adapter": {"rank": RANKS}}, r"fedex-lora needs the same rank at all of them"),
        ("flora", {"server": {"aggregation": "median"}}, r"averages the clients' updates, and flora does not"),
        ("flora", {"privacy": {"clip": 1.0, "where": "client"}}, r"hold dict, which would be sent without noise"),
        ("hetlora", {"server": {"aggregation": "median"}}, r"averages the clients' updates, and hetlora does not"),
        ("hetlora", {"privacy": {"clip": 1.0, "where": "client"}}, r"hold dict, which would be sent without noise"),
    ],
)
def test_mistakes_are_named(small, tmp_path, method, changes, message):
    with pytest.raises(UserError, match=message) as refused:
        experiment.train(from_dict(tree(small, method, **changes)), tmp_path / "run")
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)
