"""The LoRA methods beside FedMerge: what travels, what stays, numbers derived by hand, and the special cases."""

import asyncio
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import toy
from battery import go
from transformers import LlamaConfig, LlamaForCausalLM

from llm_fed.basics.errors import UserError
from llm_fed.method import Upload
from llm_fed.methods.fedalt import FedALT
from llm_fed.methods.fedsa import FedSA
from llm_fed.methods.ffa import FFA
from llm_fed.methods.ifca import IFCA
from llm_fed.models.lora import Lora, layout
from llm_fed.state import State
from llm_fed.state.wire import pack
from llm_fed.testing.federation import STRUCTURE


def numbers(**entries: float) -> State:
    return State.of(
        {name.replace("_", "."): torch.tensor([value], dtype=torch.float64) for name, value in entries.items()}
    )


def serve(method, state, uploads, server=None):
    return asyncio.run(method.server_update(server or toy.server(), state, uploads))


def names_of(state: State, ending: str = "") -> set[str]:
    return {name for name in state if name.endswith(ending)}


def test_ffa_never_changes_a_and_averages_b_alone(tmp_path):
    run = go("ffa", tmp_path)
    personal = run.ask("personalize", run.messages())
    first = run.server.initial()
    for state in personal.values():
        for name in names_of(first, "lora_A"):
            assert torch.equal(state[name], first[name])
        assert any(state[name].norm() > 0 for name in names_of(first, "lora_B"))
    for upload in run.uploads():
        assert names_of(upload.content) == names_of(first, "lora_B")
    assert all(site.memory == {} for site in run.clients.values())


def test_fedsa_shares_a_and_keeps_b(tmp_path):
    run = go("fedsa", tmp_path)
    first = run.server.initial()
    for upload in run.uploads():
        assert names_of(upload.content) == names_of(first, "lora_A")
    personal = run.ask("personalize", run.messages())
    for name in names_of(first, "lora_A"):
        assert torch.equal(personal["c0"][name], personal["c1"][name])
    for name in names_of(first, "lora_B"):
        assert torch.equal(personal["c0"][name], run.clients["c0"].memory["own"][name])
        assert not torch.equal(personal["c0"][name], personal["c1"][name])


@pytest.mark.parametrize("method", [FFA(), FedSA()])
def test_the_mean_is_weighted_by_numbers_of_examples(method):
    """1 + (1 * 4 + 3 * 8) / 4 = 8."""
    uploads = [Upload("a", 1, 0, numbers(x=4.0)), Upload("b", 3, 0, numbers(x=8.0))]
    assert serve(method, numbers(x=1.0), uploads).row.tolist() == [8.0]


def test_bytes_are_those_of_the_potara_paper():
    """Section 4.3, LLaMA-3.2-3B, rank 8 on q, k, v: 2,064,384 parameters of A and 1,146,880 of B, in float32 8.26 MB
    and 4.59 MB: what FedSA and FFA-LoRA upload. FedIT uploads both."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
                        head_dim=128, intermediate_size=8192, vocab_size=128256)
        )  # fmt: skip
    places = layout(model, Lora(8, 16, 0.0, ("q_proj", "k_proj", "v_proj")))
    whole = State(places, torch.zeros(places.size))
    for shared, parameters in ((FedSA.shared, 2_064_384), (FFA.shared, 1_146_880), (r".*", 3_211_264)):
        sent = whole.select(shared)
        assert sent.layout.size == parameters
        assert 4 * parameters < len(pack(sent)) < 4 * parameters + 40_000  # names and shapes of 168 entries


@pytest.mark.parametrize("name", ["fedem", "ifca"])
def test_with_one_model_it_is_fedit(tmp_path, name):
    one, fedit = go(name, tmp_path / name, settings={"num_models": 1}), go("fedit", tmp_path / "fedit")
    assert one.losses() == fedit.losses()
    assert torch.equal((one.state if name == "fedem" else one.state["models"][0]).row, fedit.state.row)


@pytest.mark.parametrize(
    ("name", "settings", "sent", "kept"),
    [
        ("fedem", {"num_models": 2}, r"\.expert[01]\.lora_", r"\.router$"),
        ("pfedmoe", {}, r"\.global\.lora_", r"\.local\.lora_|\.router$"),
        ("feddpa", {"variant": "t"}, r"\.global\.lora_", r"\.local\.lora_"),
    ],
)
def test_what_is_sent_and_what_a_client_keeps(tmp_path, name, settings, sent, kept):
    run = go(name, tmp_path, settings=settings)
    for upload in run.uploads():
        own = run.clients[upload.client].memory["own"]
        assert all(re.search(sent, entry) for entry in upload.content) and len(upload.content)
        assert all(re.search(kept, entry) for entry in own) and own.norm() > 0


def test_fedalt_sends_the_mean_of_the_others():
    """own = 1, 2, 6: the others' means are (2 + 6) / 2 = 4, (1 + 6) / 2 = 3.5 and (1 + 2) / 2 = 1.5; a newcomer is sent
    9 / 3 = 3."""
    method = FedALT()
    uploads = [Upload(name, 1, 0, numbers(m_own_lora=value)) for name, value in (("a", 1.0), ("b", 2.0), ("c", 6.0))]
    state = serve(method, {"own": {}, "sum": numbers(m_own_lora=0.0)}, uploads)
    sent = {name: method.broadcast(state, name) for name in ("a", "b", "c", "new")}
    assert {name: message.row.item() for name, message in sent.items()} == {"a": 4, "b": 3.5, "c": 1.5, "new": 3}
    assert set(sent["a"]) == {"m.rest.lora"}


def test_fedalt_trains_its_own_and_never_the_rest(tmp_path):
    run = go("fedalt", tmp_path)
    personal = run.ask("personalize", messages := run.messages())
    for name, state in personal.items():
        for entry in messages[name]:
            assert torch.equal(state[entry], messages[name][entry])
        own = run.clients[name].memory["own"]
        assert all(".own.lora_" in entry or entry.endswith(".router") for entry in own)
        # What was kept is what was sent: the server's copy is the client's own.
        assert torch.equal(own.select(r"\.own\.").row, run.state["own"][name].row)


def test_feddpa_f_trains_the_local_adapter_after_the_federation_from_the_global_one(tmp_path):
    run = go("feddpa", tmp_path, settings={"variant": "f", "personal_share": 0.25, "anchors": 2})
    assert all(site.memory == {} for site in run.clients.values())
    before = run.ask("personalize", run.messages())["c0"]
    for name in names_of(before, "lora_A"):  # until then both adapters are the global one, so any mix of them is
        assert torch.equal(before[name], before[name.replace(".local.", ".global.")])
    run.ask("finish", run.messages())
    after = run.ask("personalize", run.messages())["c0"]
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved and all(".local." in name for name in moved)


def test_feddpa_mixes_by_similarity(tmp_path):
    """alpha is the local adapter's weight: the client's own training prompts get the most of it."""
    run = go("feddpa", tmp_path, settings={"anchors": 1, "mix_scale": 1.0})
    state = run.ask("personalize", run.messages())["c1"]
    assert state.extras["mix.anchors"].shape == (1, 24) and float(state.extras["mix.scale"]) == 1
    weights = [
        run.runtime.engine.base.mixing_weights(run.clients["c1"].structure, [(state, example.prompt)])[0, 1].item()
        for example in run.clients["c1"].train
    ]
    assert max(weights) == pytest.approx(1, abs=1e-6) and min(weights) < 0.999


def test_ifca_warm_up_spreads_the_clients():
    """Seven clients, three models: 3, 2 and 2, the same split in every warm-up round, another for another seed."""
    splits = []
    for seed in range(2):
        server = toy.server(seed)
        server.clients = tuple(f"c{i}" for i in range(7))
        state = IFCA(num_models=3).init(server)
        splits.append([IFCA(num_models=3).broadcast(state, name)["assigned"] for name in server.clients])
        assert sorted(Counter(splits[-1]).values()) == [2, 2, 3]
        after = serve(IFCA(num_models=3), serve(IFCA(num_models=3), state, []), [])
        assert IFCA(num_models=3).broadcast(after, "c0")["assigned"] is None
    assert splits[0] != splits[1]


def test_ifca_averages_each_model_over_those_who_chose_it():
    """Model 0: 10 + (1 * 2 + 3 * 6) / 4 = 15; nobody chose model 1; model 2: 30 - 1."""
    state = {"models": [numbers(x=10.0), numbers(x=20.0), numbers(x=30.0)], "assigned": {}, "round": 5, "chosen": {}}
    uploads = [
        Upload("a", 1, 0, {"model": 0, "delta": numbers(x=2.0)}),
        Upload("b", 3, 0, {"model": 0, "delta": numbers(x=6.0)}),
        Upload("c", 9, 0, {"model": 2, "delta": numbers(x=-1.0)}),
    ]
    after = serve(IFCA(num_models=3), state, uploads)
    assert [model.row.item() for model in after["models"]] == [15, 20, 29]
    assert (after["round"], after["chosen"]) == (6, {"a": 0, "b": 0, "c": 2})


def test_ifca_clients_choose_the_lowest_loss(tmp_path):
    run = go("ifca", tmp_path, settings={"num_models": 2, "warmup_rounds": 1})
    models = run.state["models"]
    losses = run.runtime.run({name: site.losses_of(models) for name, site in run.clients.items()})
    personal = run.ask("personalize", run.messages())
    for name, state in personal.items():
        assert state.equal(models[losses[name].index(min(losses[name]))])
    assert {upload.client: upload.content["model"] for upload in run.uploads()} == {
        name: found.index(min(found)) for name, found in losses.items()
    }


def test_ifca_can_choose_by_held_out_examples(tmp_path):
    run = go("ifca", tmp_path, settings={"num_models": 2, "warmup_rounds": 1})
    message, method = {"models": run.state["models"], "assigned": None}, IFCA(num_models=2, choice_data="held-out")
    for name, site in run.clients.items():
        (by_training,) = run.runtime.run({name: method.choice(site, message)}).values()
        (losses,) = run.runtime.run({name: site.losses_of(message["models"], site.train)}).values()
        assert by_training == losses.index(min(losses))  # as it has none
        site.data = replace(site.data, held_out=site.train[:2])
        (losses,) = run.runtime.run({name: site.losses_of(message["models"], site.train[:2])}).values()
        (chosen,) = run.runtime.run({name: method.choice(site, message)}).values()
        assert chosen == losses.index(min(losses))


def test_ifca_breaks_ties_at_random(tmp_path):
    run = go("ifca", tmp_path, settings={"num_models": 2, "warmup_rounds": 1})
    message = {"models": [run.state["models"][0]] * 2, "assigned": None}
    picked = set()
    for round in range(12):
        run.clients["c0"].begin(round, 0.1)
        picked.add(*run.runtime.run({"c0": run.method.choice(run.clients["c0"], message)}).values())
    assert picked == {0, 1}


def test_adapters_of_ifca_need_a_warm_up():
    with pytest.raises(UserError, match="warmup_rounds is 0; with adapters"):
        IFCA(warmup_rounds=0).wrap(STRUCTURE, None)
