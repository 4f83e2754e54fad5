"""Fused elementwise work is what a base computes itself, to rounding; and nobody else notices."""

from dataclasses import replace

import pytest
import tiny
import torch
from answers import Setting
from stock_training import cohort
from torch import nn
from transformers.models.llama import modeling_llama

from llm_fed.basics.errors import UserError
from llm_fed.engine import fused
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.capture import USES, Captures, CudaGraphs
from llm_fed.engine.engine import Engine
from llm_fed.engine.fit import fit
from llm_fed.engine.fused import Kernels
from llm_fed.engine.generation import generate
from llm_fed.engine.ways import Ways, describe, untried, ways
from llm_fed.models.lora import Lora
from llm_fed.settings.config import EngineConfig
from llm_fed.testing.tiny import language_base

LORA = Lora(rank=8, alpha=16, dropout=0.1, target_modules=("q_proj", "v_proj", "down_proj"))
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Counting:
    """Plain torch in the place of a library's kernels."""

    def __init__(self):
        self.calls = {"gated": 0, "rotated": 0}

    def gated(self, gate, up):
        self.calls["gated"] += 1
        return nn.functional.silu(gate) * up

    def rotated(self, q, k, cos, sin):
        self.calls["rotated"] += 1
        cos, sin = cos[:, None], sin[:, None]
        return tuple(x * cos + modeling_llama.rotate_half(x) * sin for x in (q, k))

    @property
    def kernels(self) -> Kernels:
        return Kernels(self.gated, self.rotated)


@pytest.mark.parametrize(("kind", "changed"), [("llama", 5 + 2), ("qwen3", 9 + 2), ("gpt2", 0), ("gemma2", 0)])
def test_what_a_base_has_of_llamas_code(kind, changed):
    """GPT-2 has nothing of it. Gemma's norms add one to their weights, and its activation is another one."""
    if kind == "gemma2":
        from transformers import Gemma2Config, Gemma2ForCausalLM

        base = Gemma2ForCausalLM(Gemma2Config(**tiny.HEADS, head_dim=8))
    else:
        base = tiny.build(kind)
    with fused.fused(base, Counting().kernels):
        assert sum("forward" in vars(module) for module in base.modules()) == changed


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_training_with_it_is_the_training_without(kind, monkeypatch):
    counting = Counting()
    monkeypatch.setattr(fused, "kernels", lambda device: counting.kernels)
    jobs = cohort(tiny.build(kind), LORA, torch.float32, name="sgd")
    model = AdaptedModel(tiny.build(kind), LORA)
    written, _ = fit(model, jobs)
    results, work = fit(replace(model, fuses=True), jobs)
    for one, other, job in zip(results, written, jobs, strict=True):
        assert (one.state.row - other.state.row).norm() < 1e-5 * (other.state.row - job.start.row).norm()
    assert set(counting.calls.values()) == {2 * work.micro_batches}  # two layers


def test_what_was_captured_with_it_is_not_replayed_without():
    captures = Captures()
    jobs = cohort(tiny.build("llama"), LORA, torch.float32, name="sgd")
    model = AdaptedModel(tiny.build("llama"), LORA, captures=captures)
    assert captures.passes(model, jobs, ".*") is captures.passes(model, jobs, ".*")
    fused = captures.passes(replace(model, fuses=True), jobs, ".*")
    assert fused is not captures.passes(model, jobs, ".*")


def test_it_leaves_everything_as_it_was():
    base, counting = tiny.build("llama"), Counting()
    own = modeling_llama.apply_rotary_pos_emb
    with pytest.raises(ZeroDivisionError), fused.fused(base, counting.kernels):
        assert modeling_llama.apply_rotary_pos_emb is not own and "forward" in vars(base.model.norm)
        _ = 1 / 0
    assert modeling_llama.apply_rotary_pos_emb is own
    assert not any("forward" in vars(module) for module in base.modules())


def test_what_kernels_do_not_take_is_computed_as_it_is_written():
    """Inputs of other dtypes than the weights', and rotations of a part of each head."""
    base, counting = tiny.build("llama"), Counting()
    norm, x = base.model.norm, torch.randn(2, 3, 24, dtype=torch.bfloat16)
    q, k = (torch.randn(1, heads, 5, 8) for heads in (4, 2))
    cos, sin = torch.randn(1, 5, 6), torch.randn(1, 5, 6)
    expected = norm(x)
    with fused.fused(base, counting.kernels):
        assert norm(x).dtype == expected.dtype and torch.equal(norm(x), expected)
        with pytest.raises(RuntimeError):  # as without: its callers give it the part that is rotated
            modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    assert not counting.calls["rotated"]


def test_auto_is_for_gpus():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert ways("auto", cpu, "bfloat16") == ways("off", gpu, "bfloat16") == Ways(False, False, "")
    assert ways("auto", gpu, "bfloat16").padding_free and not ways("auto", gpu, "float32").padding_free
    assert ways("auto", gpu, "float32").captured
    assert ways("on", cpu, "float32") == Ways(True, True, "norms")
    found, more = ways("auto", gpu, "bfloat16"), {"adapters": True, "untried": ""}
    assert "captured as CUDA graphs, without padding" in describe(found, gpu, **more)
    assert "gains nothing on cpu" in describe(ways("on", cpu, "float32"), cpu, **more)
    assert not describe(found, gpu, adapters=False, untried="") and not describe(ways("auto", cpu, ""), cpu, **more)


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("llama", lambda base: None, ""),
        ("qwen3", lambda base: None, ""),
        ("gpt2", lambda base: None, "with gpt2 yet"),
        ("qwen3", lambda base: setattr(base.config, "layer_types", ["sliding_attention"] * 2), "windows of attention"),
        ("llama", lambda base: base.gradient_checkpointing_enable(), "recomputed activations"),
    ],
)
def test_auto_leaves_alone_what_no_gpu_has_run(kind, change, why):
    base, gpu = tiny.build(kind), torch.device("cuda")
    change(base)
    assert why in untried(base) and bool(why) == bool(untried(base))
    chosen = ways("auto", gpu, "bfloat16", tried=not untried(base))
    assert (chosen.captured, chosen.padding_free, bool(chosen.fused)) == (not why,) * 3
    assert ways("on", gpu, "bfloat16", tried=False).captured
    words = describe(chosen, gpu, adapters=True, untried=untried(base))
    assert ("as they are written" in words) == bool(why) and why in words


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"target_modules": "all-linear", "dropout": 0.1, "rank": 16}, ""),
        ({"dora": True}, "DoRA"),
        ({"experts": ("a", "b"), "gate": "mix"}, "gates over experts"),
    ],
)
def test_auto_leaves_alone_what_no_gpu_has_trained(change, why):
    said = untried(tiny.build("llama"), structures=[replace(LORA, **change)])
    assert why in said and bool(why) == bool(said)


def test_nothing_trains_in_float16():
    engine = Engine(language_base(tiny.build("llama"), autocast=torch.float16))
    with pytest.raises(UserError, match="base.dtype=float16 would lose small gradients; use bfloat16 or float32"):
        engine.configure(EngineConfig(), [])


def test_a_run_records_why_its_passes_are_as_they_are_written():
    engine = Engine(language_base(tiny.build("llama", torch.float64)))
    jobs = cohort(engine.base.model, LORA, torch.float64)
    engine.fit(jobs)
    assert not engine.take_work().requested
    engine.untried = "no GPU has tried it"
    engine.fit(jobs)
    work = engine.take_work()
    assert work.why == "no GPU has tried it" and work.passes() == {"replayed": 0, "as written": work.micro_batches}


class TestOnAGpu:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("kind", ["llama", "qwen3"])
    def test_in_bfloat16_nothing_is_farther_from_float32_than_a_base_as_it_is_written(self, kind):
        """Eager, captured, without padding, fused and all together, by one step of gradient descent."""
        base = tiny.build(kind, hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32).to("cuda")
        jobs = [replace(job, batches=job.batches[:1]) for job in cohort(base, LORA, torch.float32, name="sgd")]
        truth, _ = fit(AdaptedModel(base, LORA), jobs)
        half = AdaptedModel(base.to(torch.bfloat16), LORA, autocast=torch.bfloat16)

        def error(**how) -> float:
            for _ in range(2 * USES if "captures" in how else 1):
                results, work = fit(replace(half, **how), jobs)
            assert "captures" not in how or work.replayed == work.micro_batches
            moved = [(t.state.row - j.start.row).norm() for t, j in zip(truth, jobs, strict=True)]
            off = [(r.state.row - t.state.row).norm() for r, t in zip(results, truth, strict=True)]
            return float(sum(off) / sum(moved))

        plain = error()
        assert 1e-4 < plain < 0.5
        for flat in ({}, {"padding_free": True}):
            for fuses in (False, True):
                for captured in (False, True):
                    more = {"captures": Captures()} if captured else {}
                    assert error(**flat, fuses=fuses, **more) < 1.3 * plain, (flat, fuses, captured)

    def test_in_float32_it_is_the_same(self):
        base = tiny.build("llama").to("cuda")
        jobs = cohort(base, LORA, torch.float32, name="sgd")
        written, _ = fit(AdaptedModel(base, LORA), jobs)
        results, _ = fit(AdaptedModel(base, LORA, fuses=True), jobs)
        for one, other, job in zip(results, written, jobs, strict=True):
            assert (one.state.row - other.state.row).norm() < 1e-4 * (other.state.row - job.start.row).norm()

    def test_answers_of_captured_and_fused_slots_are_those_of_rows_alone(self):
        setting, asked = Setting("llama", dtype=torch.float32), {"max_new_tokens": 40}
        setting.base.model.to("cuda")
        bank = AdapterBank(setting.base.model, setting.structure, 3)
        for k, state in enumerate(setting.states):
            bank.load(k, state)
        alone = [generate(setting.base, bank, [one], batch_size=1, **asked)[0] for one in setting.prompts]
        captures = Captures()
        for fuses in (False, True):
            answers = generate(
                setting.base, bank, setting.prompts, batch_size=4, captures=captures, fuses=fuses, **asked
            )  # fmt: skip
            assert answers == alone and not captures.said

    def test_a_capture_that_fails_leaves_torch_as_it_was(self):
        """Its streams and its random numbers."""
        graphs, x = CudaGraphs(torch.device("cuda")), torch.ones(3, device="cuda")
        torch.cuda.manual_seed(5)
        with pytest.raises(RuntimeError):
            graphs.capture(lambda: float(x.sum() + torch.randn(3, device="cuda").sum()))
        drawn = torch.randn(4, device="cuda")
        torch.cuda.manual_seed(5)
        assert torch.equal(drawn, torch.randn(4, device="cuda"))
        replay = graphs.capture(lambda: x.add_(1))
        replay()
        assert x.tolist() == [2, 2, 2]
