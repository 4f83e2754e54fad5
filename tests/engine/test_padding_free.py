"""Training on texts that lie end to end is the training in rows with padding, by the reference that a CPU runs."""

import math
from dataclasses import replace

import every
import pytest
import tiny
import torch
from stock_training import cohort
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from llm_fed.basics.errors import UserError
from llm_fed.engine import end_to_end
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.end_to_end import FlatSequences, attend, one_by_one
from llm_fed.engine.fit import fit
from llm_fed.engine.layers import TokenGroups, groups_of
from llm_fed.engine.memory import activation_checkpointing
from llm_fed.engine.packing import filled
from llm_fed.engine.passes import refusal
from llm_fed.engine.preferences import examples_of
from llm_fed.method.requests import Fitted
from llm_fed.models.lora import Lora
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.testing.tiny import HEADS, VOCABULARY, drawn

LORA = Lora(rank=3, alpha=5, dropout=0.1, target_modules=("q_proj", "v_proj"))
EXACT = torch.float64
MIXED = ["sliding_attention", "full_attention"]
MORE = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**HEADS)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**HEADS, sliding_window=None)),
    "windowed": lambda: MistralForCausalLM(MistralConfig(**HEADS, sliding_window=5)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**HEADS, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**HEADS, head_dim=8, sliding_window=5, layer_types=MIXED)),
    "qwen2, windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**HEADS, sliding_window=7, use_sliding_window=True, layer_types=MIXED)
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**HEADS, sliding_window=3, pad_token_id=0)),
    "chunked": lambda: Llama4ForCausalLM(
        Llama4TextConfig(**HEADS, head_dim=6, intermediate_size_mlp=40, num_local_experts=2, attention_chunk_size=8)
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=24, n_layer=2, n_head=4)),
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=24, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
        )
    ),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, state_size=4)
    ),
}


def build(kind, dtype=torch.float32):
    if kind not in MORE:
        return tiny.build(kind, dtype)
    model = drawn(MORE[kind], 0)
    nn.Module.to(model, dtype)
    return model.eval()


def trained(jobs, kind="llama", dtype=EXACT, **settings):
    return fit(AdaptedModel(build(kind, dtype), jobs[0].structure, **settings), jobs)


def differ(results, others, jobs) -> float:
    """The largest distance of two results, as a share of the way that training went."""
    worst = 0.0
    for one, other, job in zip(results, others, jobs, strict=True):
        assert isinstance(one, Fitted) and isinstance(other, Fitted)
        way = (other.state.row - job.start.row).norm()
        worst = max(worst, float((one.state.row - other.state.row).norm() / way))
        assert one.losses == pytest.approx(other.losses, rel=1e-4)
    return worst


CASES = [
    ("llama", LORA),
    ("llama", LORA.with_experts("one", "two", gate="router")),
    ("llama", LORA.with_experts("one", "two", gate="mix")),
    ("llama", replace(LORA, dora=True)),
    ("llama", replace(LORA, target_modules=("q_proj", "down_proj", "lm_head"))),
    ("qwen2", LORA),
    ("qwen3", LORA),
    ("mistral", LORA),
    ("gpt2", replace(LORA, target_modules=("c_attn",))),
    ("windowed", LORA),
    ("gemma3", LORA),
    ("qwen2, windows", LORA),
    ("phi3", replace(LORA, target_modules=("qkv_proj",))),
]
BOTH = [(*case, captured) for captured in (False, True) for case in CASES]


@pytest.mark.parametrize(("kind", "structure", "captured"), every.quick(BOTH, BOTH[1::2]))
def test_training_without_padding_is_the_training_in_rows(kind, structure, captured):
    """In float64 to 1e-10 of the update, with clients of unequal numbers of steps and examples, and small
    micro-batches; laid out into static memory, too."""
    jobs = cohort(build(kind), structure, EXACT, clip=1.0)
    if structure.gate == "mix":
        jobs = [replace(job, mix=mix) for job, mix in zip(jobs, [(0.3, 0.7), (1.0, 0.0), (0.5, 0.5)], strict=True)]
    written, _ = trained(jobs, kind)
    results, work = trained(
        jobs, kind, padding_free=True, captures=Captures() if captured else None, budget=64
    )  # fmt: skip
    assert 0 < differ(results, written, jobs) < 1e-10
    assert work.padding_free == work.micro_batches > 10 and (work.padded > work.tokens) == captured and not work.why


def test_half_precision_rounds_as_rows_do():
    jobs = cohort(tiny.build("llama"), LORA, torch.float32, lr=0.1, name="sgd")
    written, _ = trained(jobs, dtype=torch.float32, autocast=torch.bfloat16)
    results, _ = trained(jobs, dtype=torch.float32, autocast=torch.bfloat16, padding_free=True)
    for one, other, job in zip(results, written, jobs, strict=True):
        way = (other.state.row - job.start.row).norm()
        assert (one.state.row - other.state.row).norm() < 0.03 * way


def test_fused_is_alone_and_layers_may_be_computed_again():
    """The dropout masks of an example do not depend on who lies beside it."""
    jobs = cohort(tiny.build("llama"), LORA, EXACT)
    fused, _ = trained(jobs, padding_free=True)
    alone = [trained([job], padding_free=True)[0][0] for job in jobs]
    assert differ(fused, alone, jobs) < 1e-10
    base = tiny.build("llama", EXACT)
    base.gradient_checkpointing_enable()
    again, _ = fit(AdaptedModel(base, LORA, padding_free=True), jobs)
    assert differ(again, fused, jobs) < 1e-10
    with activation_checkpointing(base):
        assert any("forward" in vars(module) for module in base.modules())  # it was on


def test_a_replay_knows_how_long_its_texts_are(monkeypatch):
    """As many tokens in as many texts, but once one of them is far longer: a GPU's kernel is told a number that is
    captured with it."""
    told: list[bool] = []

    def attention(query, key, value, sequences, scaling, window):
        told.append(int(sequences.borders.diff().max()) <= sequences.longest)
        return one_by_one(query, key, value, sequences, scaling, window)

    monkeypatch.setattr(end_to_end, "one_by_one", attention)
    model = AdaptedModel(tiny.build("llama", EXACT), LORA, captures=Captures(), padding_free=True)
    start = cohort(model.model, LORA, EXACT)[0]
    steps = [tiny.examples(0, [15, 15, 2]), tiny.examples(1, [28, 2, 2])]
    fit(model, [tiny.fit_on("c", LORA, start.start, steps, start.optimizer)])
    assert told and all(told)


@pytest.mark.parametrize("kind", ["gemma2", "chunked", "bloom", "gpt_neo", "mamba"])
def test_bases_that_were_not_compared_are_padded(kind):
    """Soft caps, chunks, ALiBi, attention of their own, and states that run through all tokens."""
    base = build(kind)
    why = f"nobody has compared {base.config.model_type} so"
    assert refusal(AdaptedModel(base, LORA), cohort(tiny.build("llama"), LORA)) == why


def test_an_attention_that_asks_for_more_is_named():
    query = torch.ones(1, 2, 5, 4)
    sequences = {"sequences": FlatSequences(torch.tensor([0, 2, 5]), 3)}
    for asked in ({"softcap": 1.0}, {"s_aux": query}, {"is_causal": False}, {"dropout": 0.1},
                  {"attention_mask": query}, {"position_bias": query}):  # fmt: skip
        with pytest.raises(RuntimeError, match="have no attention with"):
            attend(nn.Module(), query, query, query, **sequences, **asked)


def test_what_cannot_lie_end_to_end_is_padded_and_says_why():
    """More reasons are in test_capture.py."""
    base, rope = tiny.build("llama"), {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    jobs, spread, quantised = cohort(base, LORA, EXACT), tiny.build("llama"), tiny.build("llama")
    spread.model.norm.to("meta")
    head = quantised.lm_head.weight.detach().to(torch.int8)
    quantised.lm_head.weight = nn.Parameter(head, requires_grad=False)
    for model, change, why in (
        (base, {"parameters": ("experts.gate_up_proj",)}, "target_parameters"),
        (base, {"whole": ("lm_head",)}, "head"),
        (base, {"delta": True}, "frozen weights"),
        (tiny.build("llama", rope_parameters=rope), {}, "length of each text"),
        (spread, {}, "several devices"),
        (quantised, {}, "quantised"),
    ):
        assert why in refusal(AdaptedModel(model, replace(LORA, **change)), jobs)
    assert "pictures" in refusal(AdaptedModel(base, LORA, examples_of(ObjectiveConfig(name="dpo"))), jobs)
    assert not refusal(AdaptedModel(base, LORA), jobs)


def test_micro_batches_are_filled_in_order_and_evenly():
    """Every example once, within the budget but for one that is longer; never half empty where two would be one."""
    draws = torch.Generator().manual_seed(0)
    for case in range(200):
        lengths = torch.randint(1, 60, (1 + case % 13,), generator=draws).tolist()
        budget = (40, 64, 256)[case % 3]
        batches = filled(lengths, budget)
        assert [i for batch in batches for i in batch] == list(range(len(lengths)))
        sums = [sum(lengths[i] for i in batch) for batch in batches]
        assert all(total <= budget or len(batch) == 1 for total, batch in zip(sums, batches, strict=True))
        assert (sum(lengths) <= budget) == (len(batches) == 1) or len(lengths) == 1
    assert filled([], 8) == []
    many = filled([2] * 2500, 16384)  # though they would fit into one, torch's products take 1,023 groups
    assert sum(many, []) == list(range(2500)) and max(map(len, many)) == 1023


def test_products_of_groups_are_those_of_each_and_so_are_gradients(monkeypatch):
    """Of groups of one token, too. What a GPU is asked for has the same results, here by torch's product on a CPU."""
    draws = torch.Generator().manual_seed(0)
    for lengths in ([4, 1, 7], [3], [1, 1]):
        _, groups = groups_of(range(len(lengths)), lengths)
        x = torch.randn(1, sum(lengths), 6, dtype=EXACT, generator=draws, requires_grad=True)
        factors = torch.randn(len(lengths), 5, 6, dtype=EXACT, generator=draws, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, f, groups=groups: groups.product(x, f), (x, factors))
        wanted = torch.cat([part @ f.mT for part, f in zip(x[0].split(lengths), factors, strict=True)])
        assert torch.allclose(groups.product(x, factors)[0], wanted)
        half = [each.detach().bfloat16().requires_grad_() for each in (x, factors)]
        results = []
        for kernel in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(TokenGroups, "by_kernel", lambda self, x, kernel=kernel: kernel)
                y = groups.product(*half)
                results.append([y, *torch.autograd.grad(y.float().square().sum(), half)])
        for one, other in zip(*results, strict=True):
            assert one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_a_layer_that_mixes_all_tokens_is_named():
    base = tiny.build("llama")
    bank = AdapterBank(base, LORA, 2)
    _, groups = groups_of([0, 1], [3, 4])
    attached = bank.attached(torch.tensor([0, 1]), groups=groups)
    with pytest.raises(UserError, match="cannot tell whose they are"), attached, torch.no_grad():
        base(input_ids=torch.ones(2, 7, dtype=torch.int64))


def test_the_attention_of_a_base_is_its_own_again():
    base = tiny.build("llama")
    before = base.config._attn_implementation
    with pytest.raises(ZeroDivisionError), end_to_end.attending(base, end_to_end.NAME, attend):
        assert base.model.layers[0].self_attn.config._attn_implementation == end_to_end.NAME
        _ = 1 / 0
    assert base.config._attn_implementation == before


@pytest.mark.parametrize("window", [None, 1, 3, 5, 9])
@pytest.mark.parametrize("heads", [2, 4])
def test_a_gpus_kernel_is_asked_for_the_same(heads, window, monkeypatch):
    """Its arguments, read as torch's documentation does: (S, H, D), borders of queries and keys, and no later token."""
    cuda, query = torch.device("cuda"), torch.randn(1, 4, 9, 8)
    key, value = torch.randn(2, 1, heads, 9, 8)

    def kernel(q, k, v, borders_q, borders_k, most_q, most_k, *, scale, window_size, enable_gqa):
        before, after = window_size
        assert (
            after == 0
            and (before == -1) == (window is None or window >= 5)
            and borders_q is borders_k
            and most_q == most_k == 5
        )
        assert enable_gqa == (heads != 4)
        parts = []
        for begin, end in zip(borders_q.tolist(), borders_q.tolist()[1:], strict=False):
            scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[begin:end].repeat_interleave(4 // heads, 1)) * scale
            far = torch.arange(end - begin)[:, None] - torch.arange(end - begin)  # how far behind each key lies
            unseen = (far < 0) | ((far > before) & (before >= 0))
            weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v[begin:end].repeat_interleave(4 // heads, 1)))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    sequences = FlatSequences(torch.tensor([0, 4, 9], dtype=torch.int32), 5)
    asked_for = {"scaling": 0.3, "sequences": sequences, "sliding_window": window}
    plain, _ = attend(nn.Module(), query, key, value, **asked_for)
    monkeypatch.setattr(end_to_end, "kernel_takes", lambda *given: True)
    asked, _ = attend(nn.Module(), query, key, value, **asked_for)
    assert plain.shape == (1, 9, 4, 8) and torch.allclose(plain, asked, atol=1e-6)
    monkeypatch.undo()
    takes = [end_to_end.kernel_takes(cuda, dtype, query, value) for dtype in (torch.bfloat16, torch.float32)]
    odd = end_to_end.kernel_takes(cuda, torch.bfloat16, query[..., :6], value[..., :6])
    assert takes == [True, False] and not odd


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("windows", [{}, {"sliding_window": 5, "use_sliding_window": True, "layer_types": MIXED}])
def test_a_gpu_trains_without_padding_as_in_rows(autocast, captured, windows):
    """In bfloat16 by torch's kernels, and captured all micro-batches are replayed. In float32 the products by
    client ask the device where each client's tokens end, which a graph cannot."""
    base = tiny.build("qwen3", **windows).to("cuda")  # whose heads have 8 numbers each
    jobs = cohort(base, replace(LORA, rank=8), torch.float32)
    model = AdaptedModel(base, replace(LORA, rank=8), autocast=autocast)
    written, _ = fit(model, jobs)
    flat = replace(model, padding_free=True, captures=Captures() if captured else None)
    for _ in range(2 * USES if captured else 1):
        results, work = fit(flat, jobs)
    assert work.padding_free == work.micro_batches
    if captured and autocast is torch.bfloat16:
        assert work.replayed == work.micro_batches
    for one, other, job in zip(results, written, jobs, strict=True):
        way = (other.state.row - job.start.row).norm()
        assert (one.state.row - other.state.row).norm() < (1e-5 if autocast is None else 0.1) * way
