"""Parameters and bytes as the POTARA paper counts them (Section 4.3), from configurations of the models, without
weights; and what the picture of clients over time holds of a run's lines."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from llm_fed import methods
from llm_fed.bench.costs import Parameters, count_parameters
from llm_fed.eval import activity, plots
from llm_fed.method.client import Client
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.models.lora import Lora, draw, layout
from llm_fed.settings.config import AdapterConfig, LocalConfig
from llm_fed.state.wire import pack

LLAMA = LlamaConfig(
    hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, head_dim=128,
    intermediate_size=8192, vocab_size=128256,
)  # fmt: skip
QKV = ("q_proj", "k_proj", "v_proj")
A, B = 2_064_384, 1_146_880


VIT_TARGETS = r".*\.(query|value|q_proj|v_proj)"  # transformers has used both names


def meta(model_class, config):
    """A model without weights."""
    with torch.device("meta"):
        return model_class(config)


def structure(targets: tuple[str, ...] | str, rank: int = 8) -> Lora:
    return Lora.from_config(AdapterConfig(rank=rank, target_modules=targets))


def counts(model, lora: Lora) -> dict[str, int]:
    """Parameters of all A and of all B of one adapter."""
    shapes = layout(model, lora).shape_of.items()
    return {end: sum(math.prod(shape) for name, shape in shapes if name.endswith(f"lora_{end}")) for end in "AB"}


@pytest.fixture(scope="module")
def llama():
    return meta(LlamaForCausalLM, LLAMA)


def test_llama_3b_with_query_key_value(llama):
    """28 layers; A: 3 of r x 3072; B: r x 3072 for q (24 heads of 128), r x 1024 for k and for v (8 heads of 128)."""
    found = counts(llama, structure(QKV))
    assert found == {"A": 28 * 3 * 8 * 3072, "B": 28 * 8 * (3072 + 1024 + 1024)}
    assert found == {"A": A, "B": B}
    assert [round(4 * count / 1e6, 2) for count in found.values()] == [8.26, 4.59]  # MB in float32


def test_vit_b16_with_query_value():
    """12 layers; A and B: 2 of r x 768."""
    found = counts(meta(ViTModel, ViTConfig()), structure(VIT_TARGETS))
    assert found == {"A": 147_456, "B": 147_456}
    assert round(4 * found["A"] / 1e6, 2) == 0.59


@pytest.mark.parametrize("rank", [8, 16, 24, 32])
def test_single_model_scale_is_the_rank(llama, rank):
    """FedMerge paper, Table 1: rank-8 to rank-32 are the scales 1 to 4."""
    one = layout(llama, structure(("q_proj", "v_proj"))).size
    assert layout(llama, structure(("q_proj", "v_proj"), rank)).size == one * rank // 8


@pytest.mark.parametrize(
    "method, expected",
    [
        ({"name": "local"}, Parameters(0, 0, 0, A + B)),
        ({"name": "fedit"}, Parameters(A + B, A + B, A + B, A + B)),
        ({"name": "ffa"}, Parameters(B, B, B, A + B)),
        ({"name": "fedsa"}, Parameters(A, A, A, A + B)),
        ({"name": "feddpa"}, Parameters(A + B, A + B, A + B, 2 * (A + B))),
        # the server keeps each client's adapter and their sum; a mixer has 2 x 3072 entries per adapted layer
        ({"name": "fedalt"}, Parameters(2 * (A + B), A + B, A + B, 2 * (A + B) + 28 * 3 * 2 * 3072)),
        ({"name": "flexlora"}, Parameters(A + B, A + B, A + B, A + B)),
        # what was added so far and the last stack, which of one client is its adapter; it is sent the latter
        ({"name": "flora"}, Parameters(2 * (A + B), A + B, A + B, A + B)),
        ({"name": "fedex-lora"}, Parameters(A + B, A + B, A + B, A + B)),  # of one client there is no residual
        ({"name": "ifca", "num_models": 3}, Parameters(3 * (A + B), 3 * (A + B), A + B, A + B)),
        ({"name": "fedmerge", "num_models": 3}, Parameters(3 * (A + B), A + B, A + B, A + B)),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_what_methods_hold_and_send(llama, method, expected):
    """POTARA paper, Table 1 (who sends A, B or both); FedMerge paper, Table 1 (d models on the server, one is sent)."""
    built = methods.build(method)

    def site(id: str) -> Site:
        wrapped = built.wrap(structure(QKV), None)
        return Client(id, wrapped, LocalConfig(), 0, partial(draw, llama, wrapped))

    wrapped = built.wrap(structure(QKV), None)
    server = Server("server", wrapped, LocalConfig(), 0, partial(draw, llama, wrapped), clients=("ada",))
    assert count_parameters(built, server, {"ada": site("ada")}, partial(layout, llama)) == expected
    message = built.upload_like(built.broadcast(built.init(server), "ada"))
    assert 0 <= len(pack(message)) - 4 * expected.up < 50_000  # float32, and the names of the entries


def test_parents_count_as_the_merges_own(llama):
    """POTARA holds and sends what FedIT does; local training sends nothing (POTARA paper, Section 3.5)."""
    parents = [Parameters(A + B, A + B, A + B, A + B), Parameters(0, 0, 0, A + B)]
    merged = structure(QKV)
    site = Client("ada", merged, LocalConfig(), 0, partial(draw, llama, merged))
    server = Server("server", merged, LocalConfig(), 0, partial(draw, llama, merged))
    found = count_parameters(methods.build({"name": "potara"}), server, {"ada": site}, partial(layout, llama), parents)
    assert found == Parameters(A + B, A + B, A + B, A + B)


# The picture of clients over time


def test_a_cell_has_the_cosine_and_the_norm_over_the_rounds_median():
    """The norms of round 2 are 1, 2 and 6, whose median is 2; `b` was not in round 5."""
    lines = [
        {"round": 2, "updates": {"a": [1.0, 0.5], "b": [2.0, None], "c": [6.0, -0.5]}},
        {"round": 3},
        {"round": 5, "updates": {"a": [3.0, 1.0], "c": [3.0, 1.0]}},
    ]
    found = activity.updates_of(lines)
    assert found is not None and (list(found.clients), list(found.rounds)) == (["a", "b", "c"], [2, 5])
    np.testing.assert_allclose(found.norms, [[0.5, 1], [1, np.nan], [3, 1]])
    np.testing.assert_allclose(found.cosines, [[0.5, 1], [np.nan, np.nan], [-0.5, 1]])


def test_of_many_clients_those_are_shown_that_differ_most():
    """Twenty in direction; round by round they come in another order."""
    updates = {f"c{number:03d}": [1.0, 1 - number / 100] for number in range(100)}
    found = activity.updates_of([{"round": 1, "updates": dict(reversed(updates.items()))}])
    assert found is not None and list(found.clients) == [f"c{number:03d}" for number in range(80, 100)]
    assert found.left_out == 80


def test_both_pictures_are_drawn(tmp_path):
    found = activity.updates_of([{"round": r, "updates": {"a": [0.0, None], "b": [0.0, None]}} for r in (1, 2)])
    assert found is not None and activity.draw(tmp_path / "a.png", updates=found).stat().st_size > 1000
    options = {"metric": "rouge1", "test": (2, 60.0), "after": ("own steps", 55.0)}
    assert plots.plot_scores(tmp_path / "b.png", [1, 2], [9.0, 13.9], [1.0, 2.0], **options).stat().st_size > 1000
