"""Captured passes, without a GPU: the same pass on static memory, in shapes of a grid, is the training that it was."""

import gc
import math
from dataclasses import replace
from functools import partial
from itertools import combinations

import every
import pytest
import stock_training
import tiny
import torch

from llm_fed.basics.errors import ClientError, RunError
from llm_fed.basics.rng import Secret
from llm_fed.engine import capture
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.masks import not_captured
from llm_fed.engine.packing import Grid, divided, plan
from llm_fed.merge.delta import beneath, of_pairs
from llm_fed.method.requests import Distillation, Fitted, PerExample
from llm_fed.models.lora import Lora

LORA = Lora(rank=3, alpha=5, dropout=0.1, target_modules=("q_proj", "v_proj"))
EXACT = torch.float64
PRIVATE = PerExample(0.5, 0.3, 4.0, Secret.fresh())
cohort = partial(stock_training.cohort, steps=(10, 4, 7))  # enough of a shape to be captured and replayed


def trained(jobs, captures=None, kind="llama", dtype=EXACT, budget=None, **settings):
    model = AdaptedModel(
        tiny.build(kind, dtype), jobs[0].structure, captures=captures, budget=budget, **settings
    )  # fmt: skip
    return fit(model, jobs)


def differ(results, others) -> float:
    """The largest difference of any weight, as a share of the largest. Losses are in float32."""
    worst = 0.0
    for one, other in zip(results, others, strict=True):
        assert isinstance(one, Fitted) and isinstance(other, Fitted)
        worst = max(worst, float((one.state.row - other.state.row).abs().max() / one.state.row.abs().max()))
        assert one.losses == pytest.approx(other.losses, rel=1e-5)
    return worst


CASES = [
    ("llama", LORA),
    ("llama", LORA.with_experts("one", "two", gate="router")),
    ("llama", replace(LORA, target_modules=("q_proj", "lm_head"))),
    ("gpt2", replace(LORA, target_modules=("c_attn",))),
    ("llama", replace(LORA, dropout=0.0)),
    ("llama", LORA.with_experts("one", "two", gate="mix")),
    ("llama", replace(LORA, dora=True)),
    ("qwen3", LORA),
]


@pytest.mark.parametrize(("kind", "structure"), every.quick(CASES, CASES[:4]))
def test_a_captured_fit_equals_one_as_it_is_written(kind, structure):
    """In float64 to 1e-10, whatever was replayed before; the shapes are wider than the examples."""
    jobs = cohort(tiny.build(kind), structure, EXACT, clip=1.0)
    if structure.gate == "mix":
        jobs = [replace(job, mix=(0.3, 0.7)) for job in jobs]
    (written, plain), captures = trained(jobs, kind=kind), Captures()
    model = AdaptedModel(tiny.build(kind, EXACT), structure, captures=captures)
    for again in range(3):
        results, work = fit(model, jobs)
        assert 0 < differ(results, written) < 1e-10
        assert work.tokens == plain.tokens and work.padded > plain.padded and not captures.said
        assert work.replayed < work.micro_batches / 2 or again
    assert work.replayed > 3


def test_what_needs_no_padding_is_equal_to_the_last_bit(monkeypatch):
    """Of rows, tokens and targets that are in the grid; replayed, too."""
    jobs = cohort(tiny.build("llama"), LORA, EXACT)
    batches = [tiny.examples(step, [48, 48]) for step in range(2 * USES)]
    assert len({sum(sum(e.target) for e in b) for b in batches}) == 1
    jobs = [tiny.fit_on(job.site, LORA, job.start, batches, job.optimizer, seed=job.seed) for job in jobs[:2]]
    captures = Captures()
    results, work = trained(jobs, captures)
    written, plain = trained(jobs)
    assert work.replayed == USES and work.padded == plain.padded
    for one, other in zip(results, written, strict=True):
        assert torch.equal(one.state.row, other.state.row) and one.losses == other.losses


@pytest.mark.parametrize("padding_free", [False, True], ids=["rows", "end to end"])
def test_who_fails_harms_nobody_and_is_told_in_the_same_words(padding_free):
    """What pads repeats the last row, text or target: where a client's numbers are not finite, the others' are as
    before."""
    jobs = cohort(tiny.build("llama"), LORA, EXACT)
    for broken in range(3):
        row = jobs[broken].start.row.clone()
        row[::7] = math.nan
        asked = [replace(job, start=job.start.like(row)) if k == broken else job for k, job in enumerate(jobs)]
        written, _ = trained(asked)
        captures = Captures()
        for of in (None, captures, captures):
            results, _ = trained(asked, of, padding_free=padding_free)
            assert isinstance(results[broken], ClientError) and str(results[broken]) == str(written[broken])
            healthy = [k for k in range(3) if k != broken]
            assert differ([results[k] for k in healthy], [written[k] for k in healthy]) < 1e-10


def test_a_loss_that_becomes_infinite_in_a_replay_has_the_same_error():
    jobs = cohort(tiny.build("llama"), replace(LORA, dropout=0.0), torch.float32, lr=1e19, name="sgd")
    written, _ = trained(jobs, dtype=torch.float32)
    assert all(isinstance(each, ClientError) and "lower local.lr" in str(each) for each in written)
    for padding_free in (False, True):
        model = AdaptedModel(tiny.build("llama"), jobs[0].structure, captures=Captures(), padding_free=padding_free)
        for _ in range(3 * USES):
            results, work = fit(model, jobs)
        assert work.replayed and [str(each) for each in results] == [str(each) for each in written]


def test_autocast_is_kept():
    jobs = cohort(tiny.build("llama"), LORA, torch.float32)
    written, captures = trained(jobs, dtype=torch.float32, autocast=torch.bfloat16)[0], Captures()
    model = AdaptedModel(tiny.build("llama"), LORA, captures=captures, autocast=torch.bfloat16)
    for _ in range(USES):
        results, work = fit(model, jobs)
    assert work.replayed
    for one, other, job in zip(results, written, jobs, strict=True):
        way = (other.state.row - job.start.row).norm()
        assert (one.state.row - other.state.row).norm() < 0.1 * way
        assert one.losses == pytest.approx(other.losses, rel=5e-3)


def test_what_is_as_it_is_written_says_why_once(caplog):
    """Also where texts would lie end to end."""
    jobs, captures = cohort(tiny.build("llama"), LORA, EXACT), Captures()
    product = {"model.layers.0.self_attn.q_proj": (torch.ones(24, 1), torch.ones(1, 24))}
    for some, why in (
        ([replace(job, private=PRIVATE) for job in jobs], "single examples"),
        ([replace(jobs[0], loss=Distillation([jobs[1].start]))], "teachers"),
        ([replace(job, loss=lambda logits, targets, columns: logits[:, 0]) for job in jobs], "own loss"),
        ([replace(job, start=beneath(job.start, of_pairs(product, job.start))) for job in jobs], "beneath"),
    ):
        caplog.clear()
        captures.said.clear()
        for _ in range(2):
            results, work = trained(some, captures, padding_free=True)
        assert differ(results, trained(some)[0]) == 0 and why in work.why and not work.replayed + work.padding_free
        (line,) = captures.said
        assert why in line and [record.getMessage() for record in caplog.records] == [line]


class Breaks(capture.Graphs):
    """Captures fail after the first few."""

    error: Exception = RuntimeError("operation not permitted when stream is capturing")
    good = 1
    made = 0

    def capture(self, run):
        type(self).made += 1
        if self.made > self.good:
            raise type(self.error)(*self.error.args)  # one that is kept would hold on to what it went through
        return run


@pytest.mark.parametrize(
    ("raised", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (Breaks.error, False),
        (KeyError("not permitted when stream is capturing"), False),
    ],
    ids=["torch", "driver", "code", "another"],
)
def test_a_capture_that_fails_leaves_the_training_as_it_was(raised, memory, monkeypatch):
    """All then run as they are written, and nothing is added twice."""

    class Fails(Breaks):
        error = raised

    monkeypatch.setattr(capture, "Graphs", Fails)
    jobs, captures = cohort(tiny.build("llama"), LORA, EXACT), Captures()
    model = AdaptedModel(tiny.build("llama", EXACT), LORA, captures=captures)
    written, _ = trained(jobs)
    for _ in range(4):
        results, _ = fit(model, jobs)
        assert differ(results, written) < 1e-10
    (line,) = captures.said
    assert ("memory does not suffice" if memory else "not permitted when stream") in line
    assert Fails.made == 2


@pytest.mark.parametrize("padding_free", [False, True], ids=["rows", "end to end"])
@pytest.mark.parametrize(
    ("owner", "name", "at"), [(capture.Graphs, "capture", 1), (torch.Tensor, "backward", 12)], ids=["capture", "pass"]
)
def test_an_interrupt_leaves_a_stage_that_can_be_used(owner, name, at, padding_free, monkeypatch):
    """While a pass is captured, and between its two halves."""
    real, calls = getattr(owner, name), 0

    def interrupted(*given, **options):
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return real(*given, **options)

    jobs = cohort(tiny.build("llama"), LORA, EXACT)
    model = AdaptedModel(tiny.build("llama", EXACT), LORA, captures=Captures(), padding_free=padding_free)
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            fit(model, jobs)
    assert differ(fit(model, jobs)[0], trained(jobs)[0]) < 1e-10


def test_memory_that_does_not_suffice_gives_the_graphs_back(monkeypatch):
    """The budget halves as without captures, and nothing of the attempt before is kept."""
    jobs, captures, real = cohort(tiny.build("llama"), LORA, EXACT), Captures(), capture.one_pass
    sizes: list[int] = []

    def small(model, bank, inputs, *more):
        sizes.append(inputs.batch.input_ids.numel())
        if sizes[-1] > 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        real(model, bank, inputs, *more)

    monkeypatch.setattr(capture, "one_pass", small)
    results, work = trained(jobs, captures, budget=512)
    assert work.budget == 64 and max(sizes[-work.micro_batches :]) <= 64
    assert differ(results, trained(jobs)[0]) < 1e-10
    assert len(captures._stages) == 1
    monkeypatch.setattr(capture, "one_pass", _out_of_memory)
    with pytest.raises(RunError, match="out of memory even with one example"):
        trained(jobs, captures, budget=2)


def _out_of_memory(*given):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_fits_of_other_sizes_and_structures_share_what_they_can():
    """A smaller cohort trains in the bank of a larger one, and two structures are kept, no more."""
    base, captures = tiny.build("llama", EXACT), Captures()
    larger = replace(LORA, rank=4), replace(LORA, rank=5)
    for structure in (LORA, *larger, LORA):
        jobs = stock_training.cohort(base, structure, EXACT)
        for some in (jobs, jobs[1:]):
            model = AdaptedModel(base, structure, captures=captures)
            assert differ(fit(model, some)[0], trained(some)[0]) < 1e-10
        assert len(captures._stages) <= capture.STAGES
    stage = next(reversed(captures._stages.values()))
    assert len(stage.losses) == 3
    captures.clear()
    del stage
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is capture.CapturedPass]


def test_a_stage_keeps_nothing_of_the_jobs():
    """Neither their states nor their examples, however many fits there were."""
    captures, base = Captures(), tiny.build("llama", EXACT)
    for _ in range(3):
        fit(AdaptedModel(base, LORA, captures=captures), cohort(base, LORA, EXACT))
    gc.collect()
    kinds = [type(each).__name__ for each in gc.get_objects()]
    assert not {"FusedFit", "Fit"} & set(kinds)


@pytest.mark.parametrize("grid", [Grid(), None], ids=["grid", "any shape"])
def test_the_plan_is_the_cheapest_within_the_budget(grid):
    """Against all partitions into stretches of the sorted lengths, by brute force; a length beyond the budget stands
    alone."""
    draws = torch.Generator().manual_seed(0)

    def size(part):
        rows, tokens = len(part), max(part)
        return grid.rows(rows) * grid.tokens(tokens) if grid else rows * tokens

    for case in range(60):
        lengths = torch.randint(1, 60, (1 + case % 7,), generator=draws).tolist()
        budget, overhead = (64, 256)[case % 2], (0, 40)[case // 2 % 2]
        batches, tokens = divided(lengths, budget, overhead, grid)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        ordered, best = sorted(lengths), math.inf
        for count in range(len(lengths)):
            for cuts in combinations(range(1, len(lengths)), count):
                parts = [ordered[begin:end] for begin, end in zip((0, *cuts), (*cuts, None), strict=True)]
                if all(size(part) <= budget or len(part) == 1 for part in parts):
                    best = min(best, sum(size(part) + overhead for part in parts))
        assert tokens + overhead * len(batches) == best
    assert plan([], 64, 0, grid) == []


def test_attention_in_a_graph_has_the_masks_of_the_pass_as_it_is_written(monkeypatch):
    """None, and `is_causal` in their place: transformers keeps an explicit mask where it sees that a stream is
    captured."""
    from transformers.utils import import_utils

    seen, attention = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*given, **options):
        seen.append((options.get("attn_mask") is None, bool(options.get("is_causal"))))
        return attention(*given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True, raising=False)
    jobs, before = cohort(tiny.build("llama"), LORA, EXACT)[:1], import_utils.is_cuda_stream_capturing
    with not_captured():
        trained(jobs)
        assert not import_utils.is_tracing()
    assert set(seen) == {(True, True)} and import_utils.is_cuda_stream_capturing is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_graphs_train_as_the_passes_that_they_hold(autocast):
    """On a card: nearly all micro-batches are replayed, and the result is that of passes as they are written, in
    float32 to 1e-4 of the way, and else within the rounding of 16 bits."""
    base = tiny.build("llama").to("cuda")
    jobs = cohort(base, LORA, torch.float32)
    model = AdaptedModel(base, LORA, autocast=autocast)
    written, _ = fit(model, jobs)
    captured = replace(model, captures=(captures := Captures()))
    for _ in range(2 * USES):
        results, work = fit(captured, jobs)
    assert not captures.said and work.replayed == work.micro_batches
    for one, other, job in zip(results, written, jobs, strict=True):
        way = (other.state.row - job.start.row).norm()
        assert (one.state.row - other.state.row).norm() < (1e-4 if autocast is None else 0.1) * way
