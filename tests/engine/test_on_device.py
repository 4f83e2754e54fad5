"""Work that clients share equals the work of each alone, on the CPU and, marked `gpu`, on a GPU."""

from dataclasses import replace
from typing import Any

import every
import every_family
import pytest
import tiny
import torch
from stock_training import cohort, fitted

from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.generation import generate, option_log_likelihoods
from llm_fed.engine.inference import mean_losses
from llm_fed.kinds.language import load_base
from llm_fed.models.lora import Lora
from llm_fed.settings.config import BaseConfig
from llm_fed.testing.tiny import SPECIAL, VOCABULARY, language_base, tokenizer

STRUCTURE = Lora(rank=8, alpha=16, dropout=0.0, target_modules=("q_proj", "v_proj", "down_proj"))
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


def model_on(device: str, kind: str = "llama"):
    return tiny.build(kind).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("autocast", "most"), [(None, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("kind", every.quick(["llama", "qwen3"], ["qwen3"]))
def test_fused_training_equals_each_client_alone(device, autocast, most, kind):
    model = model_on(device, kind)
    jobs = cohort(model, STRUCTURE, torch.float32, name="sgd")
    together = fitted(model, STRUCTURE, jobs, autocast=autocast)
    for job, result in zip(jobs, together, strict=True):
        (alone,) = fitted(model, STRUCTURE, [job], autocast=autocast)
        way = (alone.state - job.start).norm()
        assert way > 0.01 and (result.state - alone.state).norm() < most * way


@pytest.mark.parametrize("device", DEVICES)
def test_training_ends_where_it_ends_on_the_cpu(device):
    jobs = cohort(model_on("cpu"), STRUCTURE, torch.float32, name="sgd")
    there = fitted(model_on(device), STRUCTURE, jobs)
    for job, one, other in zip(jobs, fitted(model_on("cpu"), STRUCTURE, jobs), there, strict=True):
        assert (one.state - other.state).norm() < 1e-3 * (one.state - job.start).norm()


@pytest.mark.parametrize("device", DEVICES)
def test_answers_and_scores_in_one_batch_equal_those_alone(device):
    """Two adapters that differ, prompts of unequal lengths."""
    model = model_on(device)
    base, bank = language_base(model), AdaptedModel(model, STRUCTURE).bank(2)
    bank.rows.data.normal_(0, 0.3, generator=torch.Generator(device).manual_seed(0))
    draws = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=draws).tolist() for length in (3, 11, 7, 20)]
    asked = [(n % 2, prompt) for n, prompt in enumerate(prompts)]
    together = generate(base, bank, asked, max_new_tokens=6, batch_size=4)
    assert together == [generate(base, bank, [one], max_new_tokens=6, batch_size=1)[0] for one in asked]
    scored = [(row, prompt, [[2, 3], [4]]) for row, prompt in asked]
    likelihoods = option_log_likelihoods(base, bank, scored, batch_size=8)
    for one, expected in zip(scored, likelihoods, strict=True):
        assert option_log_likelihoods(base, bank, [one], batch_size=8)[0] == pytest.approx(expected, abs=1e-4)
    examples = tiny.examples(3, [9, 14])
    losses = mean_losses(AdaptedModel(model, STRUCTURE), bank, [(0, examples), (1, examples)])
    assert losses[0] != pytest.approx(losses[1], abs=1e-3)


EXPERTS = Lora(4, 8, 0.0, ("q_proj", "v_proj"), parameters=("experts.down_proj", "experts.gate_up_proj"))
WIDE = {"hidden_size": 64}  # of quantised layers, in blocks of 64
BASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # family, its configuration, settings of `base`
    **{
        family: (family, {}, {})
        for family in ("llama", "mistral", "gemma2", "gemma3_text", "qwen2", "qwen3", "mixtral")
    },
    **{f"{family}, window": (family, {"sliding_window": 4}, {}) for family in ("mistral", "gemma3_text")},
    **{f"llama, {name}": ("llama", WIDE, {"quantization": name}) for name in ("nf4", "int8")},
    "llama, recomputed": ("llama", {}, {"activation_checkpointing": True}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", every.quick(BASES, ["gemma3_text, window"]))
def test_a_base_trains_as_on_a_gpu_as_each_client_alone_as_written(device, name, tmp_path):
    """Loaded from disk, in bfloat16; captured, without padding and fused, as far as the base allows it."""
    family, changes, settings = BASES[name]
    every_family.build(family, torch.float32, **changes).save_pretrained(tmp_path)
    tokenizer(**SPECIAL).save_pretrained(tmp_path)
    base = load_base(BaseConfig(name=str(tmp_path), dtype="bfloat16", **settings), device)
    written = AdaptedModel(base.model, EXPERTS if family == "mixtral" else STRUCTURE, autocast=base.autocast)
    jobs = cohort(base.model, written.structure, torch.float32, steps=(3, 3, 3), name="sgd")
    fast = replace(written, captures=Captures(), padding_free=True, fuses=True)
    for _ in range(USES + 1):
        together, _ = fit(fast, jobs)
    for job, result in zip(jobs, together, strict=True):
        ((alone,), _) = fit(written, [job])
        way = (alone.state - job.start).norm()
        assert way > 0.001 and (result.state - alone.state).norm() < 0.15 * way
