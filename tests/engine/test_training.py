"""Fused training against client-by-client training with stock PEFT and transformers' own loss."""

import copy
import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import every
import pytest
import tiny
import torch
from stock_training import batches_of, cohort, fitted, stock, successes

from llm_fed.basics.errors import ClientError, RunError, UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.fit import fit
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Fitted
from llm_fed.models.lora import Lora, draw
from llm_fed.state import State
from llm_fed.tasks.common import Encoded

KINDS = ["llama", "qwen3", "gpt2"]


def difference(left: State, right: State) -> float:
    assert left.layout == right.layout
    return (left.row - right.row).abs().max().item()


def assert_equal_to_stock(model, structure, jobs, *, train="", checkpointing=False, tolerance=1e-10, **options) -> None:
    results = fitted(model, structure, [replace(job, train=train + "$") for job in jobs], **options)
    for job, result in zip(jobs, results, strict=True):
        expected, losses = stock(model, structure, job, train, checkpointing=checkpointing)
        assert difference(expected, job.start) > 1e-3  # it was trained
        assert difference(result.state, expected) <= tolerance
        assert result.losses == pytest.approx(losses, rel=1e-5)  # transformers' loss is float32


@pytest.mark.parametrize("kind", KINDS)
def test_fused_training_equals_stock_peft(kind):
    """Also one by one, and in passes of 64 tokens."""
    model, structure = tiny.build(kind, torch.float64), tiny.structure_of(kind)
    jobs = cohort(model, structure)
    assert_equal_to_stock(model, structure, jobs)
    together = fitted(model, structure, jobs)
    for budget in (1, 64):
        for one, other in zip(fitted(model, structure, jobs, budget=budget), together, strict=True):
            assert difference(one.state, other.state) <= 1e-10


OPTIMIZERS: list[dict[str, Any]] = [
    {"clip": 0.05, "proximal": 0.3},
    {"name": "adam", "weight_decay": 0.2},
    {"name": "sgd", "momentum": 0.9, "weight_decay": 0.2, "clip": 0.5},
    {"decay": "linear"},
    {"decay": "cosine", "warmup": 1},
    {"clip": 0.05},
    {"proximal": 0.3},
    {"weight_decay": 0.2},
    {"name": "adam"},
    {"name": "sgd"},
    {"name": "sgd", "warmup": 2},
]


@pytest.mark.parametrize("settings", every.quick(OPTIMIZERS, OPTIMIZERS[:5]), ids=str)
def test_clipping_proximal_term_and_optimizers_equal_stock_peft(settings):
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama")
    assert_equal_to_stock(model, structure, cohort(model, structure, **settings))


@pytest.mark.parametrize("train", ["", "lora_B"])
def test_each_client_has_its_own_anchor_and_correction(train):
    """The correction is added after clipping; both count the trained entries alone."""
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama")
    jobs = cohort(model, structure, name="sgd", lr=0.3)
    points = [draw(model, structure, generator(9, k), torch.float64) for k in range(3)]
    for k, (job, point) in enumerate(zip(jobs, points, strict=True)):
        own = [{"proximal": 0.3, "anchor": point}, {"clip": 0.01, "correction": 0.1 * point}, {}][k]
        jobs[k] = replace(job, optimizer=replace(job.optimizer, **own))
    assert_equal_to_stock(model, structure, jobs, train=train)


def test_an_anchor_of_another_structure_is_refused():
    model, structure = tiny.build("llama"), tiny.structure_of("llama")
    (job,) = cohort(model, structure, torch.float32, clients=[0])
    other = replace(job.optimizer, proximal=1.0, anchor=job.start.select("lora_A"))
    with pytest.raises(ValueError, match="need the entries"):
        fitted(model, structure, [replace(job, optimizer=other)])


def test_training_a_part_equals_stock_peft_and_leaves_the_rest():
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama")
    jobs = cohort(model, structure)
    assert_equal_to_stock(model, structure, cohort(model, structure, clip=0.05), train="lora_B")
    mixed = [replace(job, train=t) for job, t in zip(jobs, ["lora_A$", "lora_B$", ".*"], strict=True)]
    results = fitted(model, structure, mixed)
    for job, train, result in zip(jobs, ["lora_A", "lora_B", ""], results, strict=True):
        assert difference(result.state, stock(model, structure, job, train)[0]) <= 1e-10


@pytest.mark.parametrize(
    ("kind", "changes", "tolerance"),
    [
        ("llama", {"attn_implementation": "eager"}, 1e-6),  # transformers computes its softmax in float32
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, 1e-10),
        ("llama", {"attention_dropout": 0.5}, 1e-10),
        ("gpt2", {"resid_pdrop": 0.5}, 1e-10),
    ],
    ids=["eager attention", "sliding window", "attention dropout", "residual dropout"],
)
def test_other_attention_and_the_bases_dropout_change_nothing(kind, changes, tolerance):
    model, structure = tiny.build(kind, torch.float64, **changes), tiny.structure_of(kind)
    assert_equal_to_stock(model.train(), structure, cohort(model, structure), tolerance=tolerance)


def test_an_adapted_head_equals_stock_peft():
    model = tiny.build("llama", torch.float64, tie_word_embeddings=False)
    structure = Lora(rank=2, alpha=4, dropout=0.0, target_modules=("lm_head", "q_proj"))
    assert_equal_to_stock(model, structure, cohort(model, structure))


@pytest.mark.parametrize("kind", every.quick(KINDS, ["llama", "gpt2"]))
def test_activation_checkpointing_equals_stock_peft_and_recomputes(kind):
    model, structure = tiny.build(kind, torch.float64), tiny.structure_of(kind)
    model.gradient_checkpointing_enable()
    calls = []
    mlp = next(module for name, module in model.named_modules() if name.endswith("mlp"))
    handle = mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    jobs = cohort(model, structure)
    _, work = fit(AdaptedModel(model, structure), jobs)
    handle.remove()
    assert len(calls) == 2 * work.micro_batches  # forward and recomputation
    plain = copy.deepcopy(model)
    plain.gradient_checkpointing_disable()
    results = fitted(model, tiny.structure_of(kind, 0.3), jobs)
    for one, other in zip(results, fitted(plain, tiny.structure_of(kind, 0.3), jobs), strict=True):
        assert one.state.equal(other.state)  # also the dropout masks are those of the first pass
    if kind != "gpt2":  # stock PEFT recomputes in training mode only, where GPT-2's dropout is on
        assert_equal_to_stock(model, structure, jobs, checkpointing=True)
    assert not any("forward" in vars(module) for module in model.modules())


def test_dropout_is_each_clients_own_whatever_the_packing():
    """With packing-independent masks the fused result is the lonely one; another seed is another result."""
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama", 0.3)
    jobs = cohort(model, structure)
    together = fitted(model, structure, jobs)
    again = fitted(model, structure, jobs)
    small = fitted(model, structure, jobs, budget=50)
    off = fitted(model, tiny.structure_of("llama"), jobs)
    for job, one, same, repacked, plain in zip(jobs, together, again, small, off, strict=True):
        (alone,) = fitted(model, structure, [job])
        (other,) = fitted(model, structure, [replace(job, seed=99)])
        assert one.state.equal(same.state)
        assert difference(one.state, repacked.state) <= 1e-10
        assert difference(one.state, alone.state) <= 1e-10
        assert difference(one.state, other.state) > 1e-4
        assert difference(one.state, plain.state) > 1e-4


def test_dropout_masks_differ_between_clients_steps_and_examples(monkeypatch):
    model, structure = tiny.build("llama"), tiny.structure_of("llama", 0.5)
    batch = tiny.examples(0, [12]) * 2
    start = cohort(model, structure, torch.float32)[0].start
    jobs = [tiny.fit_on(f"c{k}", structure, start, [batch] * 2, Optimizer(0.0), seed=k) for k in range(2)]
    masks: list[torch.Tensor] = []
    original = AdapterBank.draw_masks

    def recorded(*args, **more):
        drawn = original(*args, **more)
        assert drawn is not None
        masks.append(drawn)
        return drawn

    monkeypatch.setattr(AdapterBank, "draw_masks", recorded)
    fit(AdaptedModel(model, structure), jobs)
    rows = [row for mask in masks for row in mask]
    assert len(rows) == 8
    for one, other in combinations(rows, 2):
        assert abs((one == other).double().mean() - 0.5) < 0.05


def test_autocast_is_close_to_float32_and_to_stock_peft():
    """SGD, whose steps are proportional to gradients: 8 bits of mantissa through ~20 roundings."""
    autocast = torch.bfloat16
    model, structure = tiny.build("llama"), tiny.structure_of("llama")
    jobs = cohort(model, structure, torch.float32, lr=0.05, name="sgd", clip=0.5)
    half = fitted(model, structure, jobs, autocast=autocast)
    full = fitted(model, structure, jobs)
    for job, one, exact in zip(jobs, half, full, strict=True):
        assert one.state.row.dtype == torch.float32
        moved = (exact.state - job.start).norm()
        assert 0 < (one.state - exact.state).norm() < 0.05 * moved
        expected, _ = stock(model, structure, job, autocast=autocast)
        assert (one.state - expected).norm() < 0.05 * moved


@pytest.mark.parametrize("poison", ["start", "lr"])
def test_a_clients_nan_ends_that_client_alone(poison):
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama")
    jobs = cohort(model, structure)
    if poison == "lr":
        bad, step = replace(jobs[0], optimizer=Optimizer(1e300)), 2
    else:
        row = jobs[0].start.row.clone()
        row[7] = float("inf")
        bad, step = replace(jobs[0], start=jobs[0].start.like(row)), 1
    adapted = AdaptedModel(model, structure)
    results, work = fit(adapted, [bad, *jobs[1:]])
    assert isinstance(results[0], ClientError)
    assert f"client c0: loss is nan at local step {step} (lr {bad.optimizer.lr:g}); lower local.lr" in str(results[0])
    worked = [shortened(bad, step), *jobs[1:]]  # its later steps are spared
    assert work.tokens == sum(len(e.input_ids) for job in worked for batch in batches_of(job) for e in batch)
    without = fitted(model, structure, jobs[1:])
    for one, other in zip(successes(results[1:]), without, strict=True):
        assert difference(one.state, other.state) <= 1e-12
    # As long as it takes part, hence in the same packing, it does not move a bit of the others.
    poisoned, _ = fit(adapted, [shortened(job, step) for job in (bad, *jobs[1:])])
    clean = fitted(model, structure, [shortened(job, step) for job in jobs])
    assert isinstance(poisoned[0], ClientError)
    assert all(one.state.equal(other.state) for one, other in zip(successes(poisoned[1:]), clean[1:], strict=True))


def test_a_last_step_to_infinity_is_that_clients_error():
    model, structure = tiny.build("llama"), tiny.structure_of("llama")
    jobs = [shortened(job, 1) for job in cohort(model, structure, torch.float32, name="sgd")]
    # float32 ends at 3.4e38, and a large alpha makes large gradients
    jobs[1] = replace(jobs[1], optimizer=Optimizer(3e38, "sgd"))
    results, _ = fit(AdaptedModel(model, replace(structure, alpha=500)), jobs)
    assert isinstance(results[1], ClientError) and "client c1: weights not finite after 1 local steps" in str(
        results[1]
    )
    assert len(successes(results)) == 2


def shortened(job: Fit, steps: int) -> Fit:
    return replace(job, batches=job.batches[:steps])


def test_a_batch_without_a_target_token_is_that_clients_error():
    model, structure = tiny.build("llama"), tiny.structure_of("llama")
    jobs = cohort(model, structure, torch.float32)
    silent = Encoded([5, 6, 7], [True, False, False])  # nothing predicts the first token
    jobs[1] = tiny.fit_on("c1", structure, jobs[1].start, [jobs[1].batch(0), [silent]], Optimizer(0.1))
    results, _ = fit(AdaptedModel(model, structure), jobs)
    assert isinstance(results[1], ClientError)
    assert "client c1: its batch of local step 2 has no target token" in str(results[1])
    assert isinstance(results[0], Fitted) and isinstance(results[2], Fitted)
    assert isinstance(fit(AdaptedModel(model, structure), jobs[1:2])[0][0], ClientError)


@pytest.mark.parametrize("key, value", [("lr", -1.0), ("proximal", math.inf), ("momentum", 0.9)])
def test_an_optimizer_that_cannot_be_says_why(key, value):
    with pytest.raises(UserError, match=f"the optimizer adamw cannot have {key}={value}; .* and finite, and momentum"):
        Optimizer(**{"lr": 0.1, key: value})


def test_an_unknown_optimizer_is_named():
    with pytest.raises(UserError, match=r"local.optimizer='adamm' is unknown .*adamw"):
        Optimizer(0.1, "adamm").over([])


def test_the_budget_is_halved_until_memory_suffices():
    model, structure = tiny.build("llama"), tiny.structure_of("llama")
    jobs = cohort(model, structure, torch.float32)
    room = 100

    def allocate(module, inputs):
        if inputs[0].numel() > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    model.get_input_embeddings().register_forward_pre_hook(allocate)
    results, work = fit(AdaptedModel(model, structure, budget=300), jobs)
    assert work.budget == 75
    expected = fitted(model, structure, jobs, budget=75)
    assert all(one.state.equal(other.state) for one, other in zip(successes(results), expected, strict=True))
    room = 2
    with pytest.raises(RunError, match="out of memory even with one example"):
        fit(AdaptedModel(model, structure, budget=4), jobs)


def test_work_counts_tokens_padding_and_micro_batches():
    model, structure = tiny.build("llama"), tiny.structure_of("llama")
    start = draw(model, structure, generator(0))
    batches = {"a": [tiny.examples(0, [4, 10])], "b": [tiny.examples(1, [5])]}
    jobs = [tiny.fit_on(name, structure, start, its, Optimizer(0.1)) for name, its in batches.items()]
    _, work = fit(AdaptedModel(model, structure, budget=10), jobs)  # {10}, {4, 5}
    assert (work.tokens, work.padded, work.micro_batches, work.budget) == (19, 20, 2, 10)
    assert work.padding == pytest.approx(1 / 20)
