"""The families of language models: adapters of every linear layer (of a mixture of experts: of the attention) train as
stock PEFT trains them, answer as it does, and come back from disk into it."""

import math
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import every
import mixtures
import peft
import pytest
import tiny
import tiny_base
import torch
import transformers as hf
from mixtures import PROMPTS, config, states
from stock_training import cohort, fitted, per_example_gradients, stock
from stock_training import stock as trained_by_stock
from torch import nn
from transformers import PreTrainedModel

from llm_fed.basics.errors import RunError, UserError
from llm_fed.commands.doctor import COMPARED
from llm_fed.engine import generation
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.export import models
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.models.lora import Lora, layout, targets
from llm_fed.models.prompt import stop_tokens
from llm_fed.testing.tiny import drawn

EVERY = Lora(2, 4, 0.0, "all-linear")
ATTENTION = Lora(2, 4, 0.0, ("q_proj", "k_proj", "v_proj", "o_proj"))
MIXTURES = tuple(mixtures.FAMILIES)
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(config(hf.LlamaConfig)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(config(hf.Qwen2Config)),  # Qwen 2.5 is of this kind, too
    "qwen3": lambda: hf.Qwen3ForCausalLM(config(hf.Qwen3Config, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(config(hf.MistralConfig, head_dim=8, sliding_window=4)),
    "gemma": lambda: hf.GemmaForCausalLM(config(hf.GemmaConfig, head_dim=8)),
    # With a window no wider than the padding, stock training of transformers 5.24 is NaN.
    "gemma2": lambda: hf.Gemma2ForCausalLM(config(hf.Gemma2Config, head_dim=8, sliding_window=6)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(config(hf.Gemma3TextConfig, head_dim=8, sliding_window=4)),
    "phi": lambda: hf.PhiForCausalLM(config(hf.PhiConfig, hidden_size=32)),
    "phi3": lambda: hf.Phi3ForCausalLM(config(hf.Phi3Config)),  # Phi-4 is of this kind, too
    "olmo": lambda: hf.OlmoForCausalLM(config(hf.OlmoConfig)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(config(hf.Olmo2Config)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(config(hf.SmolLM3Config)),
    "granite": lambda: hf.GraniteForCausalLM(config(hf.GraniteConfig)),
    **mixtures.FAMILIES,
}


# The others are tried by `make long`; llama, qwen2, qwen3 and mistral in other files of this folder, too.
every_family = pytest.mark.parametrize(
    "family", every.quick(FAMILIES, ["gemma3", "phi", "olmo2", "smollm3", "qwen2_moe", "mixtral"])
)


def build(family: str, dtype: torch.dtype) -> Any:
    if family in MIXTURES:
        return mixtures.build(family, dtype)
    return nn.Module.to(drawn(FAMILIES[family], 0), dtype).eval()


def adapter_of(family: str) -> Lora:
    return ATTENTION if family in MIXTURES else EVERY


def test_these_are_the_families_that_the_doctor_calls_compared():
    assert {build().config.get_text_config().model_type for build in FAMILIES.values()} == set(COMPARED)


@every_family
def test_two_clients_train_as_stock_peft_trains_each(family):
    model, structure = build(family, torch.float64), adapter_of(family)
    batches = [[tiny.examples(10 * k + step, [5 + k, 9, 7]) for step in range(2)] for k in range(2)]
    starts = states(model, structure, torch.float64)
    jobs = [tiny.fit_on(f"c{k}", structure, starts[k], batches[k], Optimizer(0.01)) for k in range(2)]
    for job, result in zip(jobs, fitted(model, structure, jobs), strict=True):
        expected, _ = trained_by_stock(model, structure, job)
        torch.testing.assert_close(result.state.row, expected.row, rtol=0, atol=1e-6)


@every_family
def test_answers_in_one_batch_are_those_of_stock_peft_alone(family):
    model, structure = build(family, torch.float32), adapter_of(family)
    base, found = tiny_base.around(model), states(model, structure, torch.float32)
    bank = AdapterBank(model, structure, 2, torch.float32)
    for k, state in enumerate(found):
        bank.load(k, state)
    got = generation.generate(base, bank, PROMPTS, max_new_tokens=8, batch_size=8)
    for answer, (k, prompt) in zip(got, PROMPTS, strict=True):
        stock = tiny.stock_peft(model, structure, found[k]).eval()
        tokens = list(prompt)
        for _ in range(8):  # without a cache
            token = int(stock(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
            if token in stop_tokens(base):
                break
            tokens.append(token)
        assert answer == base.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True).strip()


@every_family
def test_stock_peft_loads_what_is_exported(family, tmp_path):
    model, structure = build(family, torch.float32), adapter_of(family)
    state = states(model, structure, torch.float32)[0]
    models.write(tmp_path / "adapter", state, structure, tiny_base.around(model), "a card\n")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    expected = tiny.stock_peft(model, structure, state).eval()(**inputs).logits
    loaded = peft.PeftModel.from_pretrained(build(family, torch.float32), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=0, atol=1e-6)


def test_a_list_of_experts_and_what_stands_beside_it_is_refused():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Linear(4, 4)
            experts = nn.ModuleList([nn.ModuleDict({"w1": nn.Linear(4, 4)}) for _ in range(2)])
            self.mlp = nn.ModuleDict({"shared_expert": nn.Linear(4, 4), "experts": experts})

    assert layout(Mixture(), Lora(1, 1, 0.0, ("attention",))).names[0] == "attention.lora_A"
    for chosen, name in (("w1", r"mlp\.experts\.0\.w1"), ("shared_expert", r"mlp\.shared_expert")):
        with pytest.raises(UserError, match=rf"matches {name}, which belongs to a mixture.*q_proj"):
            targets(Mixture(), Lora(1, 1, 0.0, (chosen,)))


def test_an_answer_of_nan_is_none():
    """As of a checkpoint with a damaged weight."""
    model = build("llama", torch.float64)
    torch.nn.init.constant_(model.get_input_embeddings().weight, math.nan)
    base = tiny_base.around(model)
    bank = AdapterBank(model, EVERY, 2, torch.float64)
    with pytest.raises(RunError, match=r"computes NaN .* for a text of [246] tokens.*base\.dtype"):
        generation.generate(base, bank, PROMPTS, max_new_tokens=8, batch_size=8)
    asked = [(row, prompt, [[3], [4, 5]]) for row, prompt in PROMPTS]
    with pytest.raises(RunError, match="computes NaN"):
        generation.option_log_likelihoods(base, bank, asked, batch_size=8)


# Layers of 4 and 8 bits, against stock PEFT on the same quantised base


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
    assert_equal_to_stock(model, [tiny.fit_on("c0", STRUCTURE, job.start, batches, job.optimizer)])


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
