"""Dropout masks that are computed from keys: the numbers, their statistics, and the training with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import stock_training
import tiny
import torch
from meter import Meter

from llm_fed.basics.rng import Secret, derive
from llm_fed.engine import dropout
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.dropout import Dropped, MaskKeys, kept, mask_keys, numbers
from llm_fed.engine.fit import fit
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.method.requests import Fitted, PerExample
from llm_fed.models.lora import Lora

LORA = Lora(rank=3, alpha=5, dropout=0.1, target_modules=("q_proj", "v_proj"))
EXACT = torch.float64
cohort = partial(stock_training.cohort, steps=(10, 4, 7))


def trained(jobs, **settings):
    base = tiny.build("llama", EXACT)
    return fit(AdaptedModel(base, jobs[0].structure, keyed_masks=True, **settings), jobs)[0]


def differ(results, others) -> float:
    worst = 0.0
    for one, other in zip(results, others, strict=True):
        assert isinstance(one, Fitted) and isinstance(other, Fitted)
        worst = max(worst, float((one.state.row - other.state.row).abs().max() / one.state.row.abs().max()))
    return worst


def test_the_numbers_are_those_of_splitmix64():
    """Against whole numbers of Python, and the first numbers that its authors' code gives for the seed 1234567."""

    def plain(seed: int, n: int) -> int:
        z = (seed + n * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [plain(1234567, n) for n in range(1, 5)] == known
    for seed in (1234567, 0, 2**63 - 1, derive(0, 1)):
        own = dropout._mixed(seed + numbers(0, 9))
        assert [number % 2**64 for number in own.tolist()] == [plain(seed, n) for n in range(1, 10)]
        assert torch.equal(dropout._mixed(seed + numbers(4, 5)), own[4:])
    assert mask_keys([7], [3], end_to_end=False).of.tolist() == [[key - 2**64 * (key >= 2**63) for key in
                                                                 (plain(7, n) for n in (1, 2, 3))]]  # fmt: skip


def keys_of(examples: int, tokens: int) -> torch.Tensor:
    return mask_keys([derive(0, n) for n in range(examples)], [tokens] * examples, end_to_end=False).of


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
def test_inputs_are_kept_with_their_probability_and_independently(share):
    """By chi-square with one degree of freedom (deviations of a normal number): the count, and for pairs of neighbours
    how often both are kept: inputs of a word and of two, tokens, examples, and layers."""
    below = round(share * 2**16) - 2**15
    keys = keys_of(8, 64)
    mask = kept(keys, numbers(0, 64), 256, below).double()  # (8, 64, 256)
    other = kept(keys, numbers(64, 64), 256, below).double()  # of another layer
    pairs = {
        "inputs": (mask[..., :-1], mask[..., 1:]), "words": (mask[..., :-4], mask[..., 4:]),
        "tokens": (mask[:, :-1], mask[:, 1:]), "examples": (mask[:-1], mask[1:]), "layers": (mask, other),
    }  # fmt: skip

    def deviations(found: torch.Tensor, expected: float) -> float:
        return float((found.mean() - expected) / (expected * (1 - expected) / found.numel()) ** 0.5)

    found = {name: deviations(one * two, share**2) for name, (one, two) in pairs.items()}
    found |= {"all": deviations(mask, share), "shares": 0.0}
    for dim in (0, 1, 2):  # no example, token or input is kept more often than the others
        rest = [each for each in range(3) if each != dim]
        counts, of = mask.sum(rest), mask.numel() / mask.shape[dim]
        chi = float(((counts - of * share) ** 2 / (of * share * (1 - share))).sum())
        found[f"dimension {dim}"] = (chi - len(counts)) / (2 * len(counts)) ** 0.5
    # Neighbours share inputs, which widens pairs' deviations to less than 1.7 of those of independent draws.
    assert all(abs(deviation) < 4 for deviation in found.values()), found


def test_a_word_of_keys_that_are_near_is_as_good():
    """Each bit of what decides falls as often on either side, and two tokens' words differ in half of them."""
    words = dropout._mixed(keys_of(16, 128)[..., None] + numbers(0, 32))
    bits = (words[..., None] >> torch.arange(64)) & 1
    count = bits[..., 0].numel()
    assert ((bits.double().mean((0, 1, 2)) - 0.5).abs() < 5 * 0.5 / count**0.5).all()
    flips = (bits[:, 1:] ^ bits[:, :-1]).double().mean((0, 1, 2))
    assert ((flips - 0.5).abs() < 5 * 0.5 / count**0.5).all()


def test_a_layer_drops_what_its_keys_say_and_holds_nothing():
    """The gradient passes where the input did; of the size of the inputs only themselves and their gradient stay."""
    keys, steps, below = keys_of(2, 50), numbers(3, 25), round(0.75 * 2**16) - 2**15
    x = torch.randn(2, 50, 98, dtype=EXACT, requires_grad=True)
    mask = kept(keys, steps, 98, below)
    y = Dropped.apply(x, keys, steps, below)
    assert torch.equal(y, x * mask) and 0.7 < mask.double().mean() < 0.8
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, mask.to(EXACT))
    with Meter() as meter:
        z = Dropped.apply(x, keys, steps, below)
    assert meter.alive() == z.nbytes


def test_masks_of_an_example_do_not_depend_on_its_neighbours():
    together = mask_keys([5, 6, 5], [4, 5, 6], end_to_end=False)
    alone, flat = mask_keys([6], [5], end_to_end=False), mask_keys([5, 6, 5], [4, 5, 6], end_to_end=True)
    assert torch.equal(together.of[1:2, :5], alone.of) and torch.equal(flat.of[:, 4:9], alone.of)
    assert torch.equal(together.of[0, :4], together.of[2, :4]) and not torch.equal(together.of[0], together.of[1])
    wide = together.widened(4, 8)
    assert isinstance(wide, MaskKeys) and wide.of.shape == (4, 8) and torch.equal(wide.of[:3, :6], together.of)


@pytest.mark.parametrize("structure", [LORA, replace(LORA, dora=True)])
def test_fused_captured_and_without_padding_are_each_client_alone(structure):
    """To 1e-10 in float64, with the same masks; drawn ones are others."""
    jobs = cohort(tiny.build("llama"), structure, EXACT, clip=1.0)
    alone = [trained([job])[0] for job in jobs]
    assert differ(trained(jobs), alone) < 1e-10
    assert differ(trained(jobs, padding_free=PaddingFree()), alone) < 1e-10
    assert differ(trained(jobs, budget=48), alone) < 1e-10
    drawn, _ = fit(AdaptedModel(tiny.build("llama", EXACT), structure), jobs)
    assert differ(drawn, alone) > 1e-4
    for free in (None, PaddingFree()):
        captures = Captures()
        model = AdaptedModel(
            tiny.build("llama", EXACT), structure, captures=captures, padding_free=free, keyed_masks=True
        )
        for _ in range(USES + 1):
            results, work = fit(model, jobs)
            assert differ(results, alone) < 1e-10
        assert work.replayed and not captures.said
        assert all(not stage._masks.numel() for stage in captures._stages.values())
        assert differ(fit(replace(model, keyed_masks=False), jobs)[0], drawn) < 1e-10  # beside it, in the same captures


def test_layers_may_be_computed_again_and_examples_be_private():
    jobs = cohort(tiny.build("llama"), LORA, EXACT)
    base = tiny.build("llama", EXACT)
    base.gradient_checkpointing_enable()
    again, _ = fit(AdaptedModel(base, LORA, keyed_masks=True), jobs)
    assert differ(again, trained(jobs)) < 1e-10
    private = [replace(job, private=PerExample(0.5, 0.0, 4.0, Secret.fresh())) for job in jobs]
    assert differ(trained(private), [trained([job])[0] for job in private]) < 1e-10


def test_without_dropout_there_are_no_keys():
    jobs = cohort(tiny.build("llama"), replace(LORA, dropout=0.0), EXACT)
    written, _ = fit(AdaptedModel(tiny.build("llama", EXACT), jobs[0].structure), jobs)
    assert differ(trained(jobs), written) == 0


def test_what_a_pass_holds_does_not_grow_with_the_inputs_of_layers():
    """Drawn masks are a byte for each input of an adapted layer; keys are eight bytes for each token."""
    base = tiny.build("llama")
    bank = AdapterBank(base, replace(LORA, target_modules="all-linear"), 1)
    with Meter() as drawn:
        masks = bank.draw_masks([1], [40])
    keys = mask_keys([1], [40], end_to_end=False)
    assert masks is not None and drawn.alive() == 40 * bank.width > 40 * 300 and keys.of.nbytes == 40 * 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_masks_of_a_cpu():
    """Bit for bit, so that an audit elsewhere has them, too; and captured passes train with them as written ones do."""
    keys, steps = keys_of(4, 50), numbers(3, 25)
    for share in (0.5, 0.95):
        below = round(share * 2**16) - 2**15
        assert torch.equal(kept(keys.cuda(), steps.cuda(), 98, below).cpu(), kept(keys, steps, 98, below))
    base = tiny.build("qwen3").to("cuda")
    jobs = cohort(base, replace(LORA, rank=8), torch.float32)
    written = AdaptedModel(base, jobs[0].structure, autocast=torch.bfloat16, keyed_masks=True)
    results, _ = fit(written, jobs)
    captured = replace(written, captures=Captures(), padding_free=PaddingFree())
    for _ in range(USES + 1):
        others, work = fit(captured, jobs)
    assert work.replayed == work.micro_batches
    for one, other, job in zip(others, results, jobs, strict=True):
        assert isinstance(one, Fitted) and isinstance(other, Fitted)
        assert (one.state.row - other.state.row).norm() < 0.1 * (other.state.row - job.start.row).norm()
