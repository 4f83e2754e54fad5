"""The bank on bitsandbytes' 4- and 8-bit layers, against stock PEFT on the same quantised base (on the CPU)."""

import bitsandbytes as bnb
import pytest
import tiny
import torch
from stock_training import cohort, fitted, per_example_gradients, stock
from torch import nn
from transformers import PreTrainedModel

from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.method.requests import Fit
from llm_fed.models.lora import Lora

STRUCTURE = Lora(rank=3, alpha=5, dropout=0.0, target_modules=("q_proj", "v_proj", "down_proj"))
SGD = "sgd"  # its steps are proportional to the gradients


def quantised(kind: str, threshold: float = 0.0) -> PreTrainedModel:
    """A tiny LLaMA, every linear layer of its blocks quantised."""
    model = tiny.build("llama", hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                sizes = child.in_features, child.out_features
                layer: nn.Linear
                if kind == "nf4":
                    layer = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4", compute_dtype=torch.float32)
                else:
                    layer = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=threshold)
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer.to("cpu"))
    return model


def assert_equal_to_stock(model: PreTrainedModel, jobs: list[Fit], autocast=None, tolerance=1e-4) -> None:
    """Float32 rounding through ten steps, relative to the way that training goes, stays far below 1e-4."""
    results = fitted(model, STRUCTURE, jobs, autocast=autocast)
    for job, result in zip(jobs, results, strict=True):
        expected, _ = stock(model, STRUCTURE, job, autocast=autocast)
        moved = (expected - job.start).norm()
        assert moved > 0.01
        assert (result.state - expected).norm() < tolerance * moved


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_fused_training_on_a_quantised_base_equals_stock_peft(kind):
    model = quantised(kind)
    assert_equal_to_stock(model, cohort(model, STRUCTURE, torch.float32, name=SGD))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bfloat16_autocast_on_a_quantised_base_is_close_to_stock_peft(kind):
    model = quantised(kind)
    assert_equal_to_stock(model, cohort(model, STRUCTURE, torch.float32, name=SGD), torch.bfloat16, tolerance=0.1)


def test_int8_outliers_equal_stock_peft_in_the_same_batch():
    """LLM.int8's outlier columns (threshold 6) depend on the whole batch, so here that is the same, unpadded one."""
    model = quantised("int8", threshold=6.0)
    (job,) = cohort(model, STRUCTURE, torch.float32, name=SGD, clients=[0])
    batches = [tiny.examples(s, [20, 20, 20]) for s in range(5)]
    assert_equal_to_stock(model, [Fit.on("c0", STRUCTURE, job.start, batches, job.optimizer)])


def test_an_evaluation_before_training_changes_nothing():
    """Without `freeze`, bitsandbytes repacks 4-bit weights in an evaluation on some CPUs, and gradients get lost."""
    fresh, used = quantised("nf4"), quantised("nf4")
    jobs = cohort(fresh, STRUCTURE, torch.float32, name=SGD)
    bank = AdapterBank(used, STRUCTURE, 1)
    with torch.no_grad(), bank.attached(torch.tensor([0, 0])):
        used(**tiny.inputs("llama", 2))
    expected, results = fitted(fresh, STRUCTURE, jobs), fitted(used, STRUCTURE, jobs)
    assert all(one.state.equal(other.state) for one, other in zip(results, expected, strict=True))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_per_example_gradients_on_a_quantised_base_are_those_of_each_example_alone(kind):
    model = quantised(kind)
    state = cohort(model, STRUCTURE, torch.float32, name=SGD)[0].start
    examples = tiny.examples(0, [6, 11, 9, 14])
    together = per_example_gradients(AdaptedModel(model, STRUCTURE), state, examples)
    for example, row in zip(examples, together, strict=True):
        (alone,) = per_example_gradients(AdaptedModel(model, STRUCTURE), state, [example])
        assert alone.norm() > 0
        assert (row - alone).norm() < 1e-4 * alone.norm()
