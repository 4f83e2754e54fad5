"""Bases whose rotary frequencies depend on a text's length (LongRoPE, dynamic NTK): every row is read as it is alone,
whoever stands beside it and whatever was computed before. Alone means: a fresh copy of the stock model, one row."""

from __future__ import annotations

import copy
from typing import Any

import every
import pytest
import tiny
import tiny_base
import torch
import transformers as hf
from answers import running
from torch import nn

from llm_fed.engine import generation, inference
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.fit import fit
from llm_fed.engine.gradients import per_example_gradients
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.models.lora import Lora, draw
from llm_fed.models.rotary import Regimes, context, regimes, row_positions
from llm_fed.testing.tiny import HEADS, drawn

BORDER = 16
THREE = Lora(2, 4, 0.0, "all-linear")
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 7.0], "rope_theta": 10000.0}
SIZES = {**HEADS, "hidden_size": 32, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}


def longrope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "longrope", "original_max_position_embeddings": BORDER, **LONG, **more}


def dynamic() -> dict[str, Any]:
    return {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def phi3() -> Any:
    config = {**SIZES, "original_max_position_embeddings": BORDER, "rope_parameters": longrope()}
    return hf.Phi3ForCausalLM(hf.Phi3Config(**config))


def gemma3() -> Any:
    """Sliding layers have the ordinary frequencies."""
    rope = {
        "full_attention": longrope(),
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    types = ["sliding_attention", "full_attention"]
    config = {**SIZES, "head_dim": 8, "sliding_window": 6, "layer_types": types, "rope_parameters": rope}
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**config))


def llama(rope: dict[str, Any], length: int) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "max_position_embeddings": length, "rope_parameters": rope}))


BASES = {
    "phi3-longrope": phi3,
    "llama-longrope": lambda: llama(longrope(), 64),
    "llama-dynamic": lambda: llama(dynamic(), BORDER),
    "gemma3-longrope": gemma3,
}
# Frequencies that depend on the batch, and those that depend on the longest text so far: the others are as these.
every_base = pytest.mark.parametrize("kind", every.quick(BASES, ["phi3-longrope", "llama-dynamic"]))
on_longrope = pytest.mark.parametrize("kind", every.quick(BASES, ["phi3-longrope"]))
on_dynamic = pytest.mark.parametrize("kind", every.quick(BASES, ["llama-dynamic"]))


def build(kind: str) -> Any:
    return nn.Module.to(drawn(BASES[kind], 0), torch.float64).eval()


class Setting:
    def __init__(self, kind: str):
        self.model = build(kind)
        self.model.generation_config = hf.GenerationConfig(eos_token_id=1)
        self.base = tiny_base.around(self.model)
        draws = torch.Generator().manual_seed(0)
        self.states = []
        for _ in range(3):
            fresh = draw(self.model, THREE, draws, torch.float64)
            noise = torch.randn(fresh.row.shape, generator=draws, dtype=torch.float64)
            self.states.append(fresh.like(fresh.row + 0.1 * noise))
        self.stock = [tiny.stock_peft(self.model, THREE, state).eval() for state in self.states]
        self.bank = AdapterBank(self.model, THREE, 3, torch.float64)
        for k, state in enumerate(self.states):
            self.bank.load(k, state)

    def alone(self, row: int) -> Any:
        """Dynamic NTK of the stock model remembers longer texts."""
        return copy.deepcopy(self.stock[row])

    def answer(self, row: int, prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt])
        said = self.alone(row).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        return said[0, len(prompt) :].tolist()

    def words(self, tokens: list[int]) -> str:
        tokens = tokens[: tokens.index(1)] if 1 in tokens else tokens
        return self.base.tokenizer.decode(tokens, skip_special_tokens=True)


def texts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(2, tiny.VOCABULARY, (length,), generator=draws).tolist() for length in lengths]


@on_dynamic
def test_answers_that_cross_the_border_are_those_of_generate_alone(kind):
    setting = Setting(kind)
    prompts = [(n % 3, text) for n, text in enumerate(texts([5, BORDER - 3, BORDER, BORDER + 1, 30, 9, 22, 12]))]
    expected = [setting.words(setting.answer(row, prompt, 9)) for row, prompt in prompts]
    for size in (1, 3, 32):
        got = generation.generate(setting.base, setting.bank, prompts, max_new_tokens=9, batch_size=size)
        assert got == expected
    assert [setting.words(tokens) for tokens in running(setting.base, setting.bank, prompts, 9)] == expected
    streamed = [*generation.stream(setting.base, setting.bank, prompts[1][1], max_new_tokens=9)]
    (whole,) = generation.generate(setting.base, setting.bank, [(0, prompts[1][1])], max_new_tokens=9, batch_size=1)
    assert setting.words(streamed) == whole


@on_longrope
def test_prompts_with_a_shared_beginning_are_those_of_generate_alone(kind):
    """A beginning within the border, prompts on both sides of it, then all within it, then all beyond it."""
    setting = Setting(kind)
    for start, rest in ((10, [2, 4, 9, 12]), (8, [1, 2, 3, 4]), (24, [1, 2, 3, 4])):
        (begin,) = texts([start], seed=start)
        prompts = [(0, begin + text) for text in texts(rest)]
        expected = [setting.words(setting.answer(row, prompt, 6)) for row, prompt in prompts]
        got = generation.generate(setting.base, setting.bank, prompts, max_new_tokens=6, batch_size=32)
        assert got == expected


@on_longrope
def test_option_scores_are_those_of_each_option_alone(kind):
    setting = Setting(kind)
    requests = [
        (n % 3, prompt, texts([1, 4, 2], seed=n)) for n, prompt in enumerate(texts([4, BORDER - 2, BORDER - 4, 30, 20]))
    ]
    for size in (1, 32):
        scores = generation.option_log_likelihoods(setting.base, setting.bank, requests, batch_size=size)
        for (row, prompt, options), ours in zip(requests, scores, strict=True):
            for option, score in zip(options, ours, strict=True):
                logits = setting.alone(row)(input_ids=torch.tensor([prompt + option]), use_cache=False).logits
                each = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(option)[:, None])
                assert score == pytest.approx(float(each.sum().detach()), abs=1e-6)


@on_dynamic
def test_a_client_trains_beside_long_texts_as_alone(kind):
    """The long one comes first, so that whatever it leaves behind is felt."""
    setting = Setting(kind)
    lengths = ([40, 35, 22], [5, 9, BORDER], [BORDER + 1, 4, 30])
    jobs = [
        Fit.on(f"c{k}", THREE, state, [tiny.examples(10 * k + step, lengths[k]) for step in range(2)], Optimizer(0.01))
        for k, (state, _) in enumerate(zip(setting.states, lengths, strict=True))
    ]
    together, _ = fit(AdaptedModel(setting.model, THREE, budget=1024), jobs)
    for job, result in zip(jobs, together, strict=True):
        (alone,), _ = fit(AdaptedModel(build(kind), THREE, budget=1), [job])
        assert (result.state.row - alone.state.row).abs().max() < 1e-10
        assert result.losses == pytest.approx(alone.losses, abs=1e-6)


@every_base
def test_gradients_losses_and_features_are_those_of_each_text_alone(kind):
    setting = Setting(kind)
    examples = tiny.examples(3, [40, 5, BORDER, BORDER + 1, 30, 22, 22, 9])
    model = AdaptedModel(setting.model, THREE, budget=1024)
    gradients = per_example_gradients(model, setting.states[0], examples)
    (loss,) = inference.mean_losses(model, setting.bank, [(0, examples)])
    total = 0.0
    for example, gradient in zip(examples, gradients, strict=True):
        stock = setting.alone(0)
        ids = torch.tensor(example.input_ids)
        labels = ids.where(torch.tensor(example.target), -100)
        logits = stock(input_ids=ids[None], use_cache=False).logits[0, :-1]
        summed = nn.functional.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100)
        entries = tiny.peft_entries(stock)
        its = torch.autograd.grad(-summed, list(entries.values()))
        for (name, _), expected in zip(entries.items(), its, strict=True):
            ours = gradient[setting.states[0].layout.slices[name]].view(expected.shape)
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)  # the loss is float32
        total += float(summed.detach())
    assert loss == pytest.approx(total / sum(sum(e.target[1:]) for e in examples), abs=1e-5)
    found = inference.features(setting.base, [example.input_ids for example in examples])
    for example, ours in zip(examples, found, strict=True):
        hidden = build(kind).base_model(input_ids=torch.tensor([example.input_ids])).last_hidden_state[0, -1]
        torch.testing.assert_close(ours, hidden.detach(), rtol=0, atol=1e-10)


def test_recomputed_activations_have_the_same_frequencies():
    """The backward pass reads a layer again."""
    plain, again = Setting("llama-dynamic"), Setting("llama-dynamic")
    again.model.gradient_checkpointing_enable({"use_reentrant": False})
    examples = tiny.examples(3, [40, 5, BORDER + 1])
    first, second = (
        per_example_gradients(AdaptedModel(each.model, THREE, budget=1024), each.states[0], examples)
        for each in (plain, again)
    )
    assert torch.equal(first, second)


def test_what_counts_as_a_regime():
    assert regimes(tiny.build("llama")) is None
    long, each = Regimes(16, False), Regimes(16, True)
    assert not long.crosses(3, 16) and long.crosses(16, 17) and not long.crosses(17, 40)
    assert not each.crosses(3, 16) and each.crosses(16, 17) and each.crosses(17, 18)
    assert regimes(build("phi3-longrope")) == Regimes(BORDER, False, read_again=True)
    assert regimes(build("llama-dynamic")) == Regimes(BORDER, True)
    assert regimes(build("gemma3-longrope")) == Regimes(BORDER, False)
    assert context(build("llama-dynamic").config) == 4 * BORDER and context(build("phi3-longrope").config) == 64
    assert row_positions(torch.tensor([2, 4]), 4).tolist() == [[0, 1, 1, 1], [0, 1, 2, 3]]


def test_the_families_that_read_a_text_again_are_all_known():
    """Transformers says so in `prepare_inputs_for_generation`, in the families' own files alone."""
    from pathlib import Path

    from llm_fed.models.rotary import _READ_AGAIN

    files = Path(hf.__file__).parent.glob("models/*/modeling_*.py")
    again = {
        file.parent.name for file in files if "self.config.original_max_position_embeddings + 1" in file.read_text()
    }
    assert again == set(_READ_AGAIN)
