"""How packing is measured, with a pretended device: its clock and its memory follow lines that are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tiny
import torch

from llm_fed.engine import calibration, inference
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.calibration import SIZES, calibrate, probes, settled, tried
from llm_fed.engine.packing import plan
from llm_fed.models.lora import Lora

LORA = Lora(2, 4, 0.1, ("q_proj", "v_proj"))


class Pretended:
    """seconds = start + each tokens, bytes = 5e6 + 4000 tokens; the first of each size is slow, as on a GPU."""

    def __init__(self, start: float = 0.010, each: float = 20e-6, most: int = 10**9):
        self.start_seconds, self.each, self.most = start, each, most
        self.ran: list[int] = []
        self.began = 0

    def run(self, lengths: Sequence[int]) -> None:
        tokens = len(lengths) * max(lengths)
        if tokens > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        self.ran.append(tokens)

    def start(self) -> None:
        self.began = len(self.ran)

    def stop(self) -> tuple[float, int]:
        since = self.ran[self.began :]
        jitter = 0.0 if self.ran.count(since[0]) == 3 else 0.004  # the second of three timed ones is undisturbed
        return sum(self.seconds(tokens) for tokens in since) + jitter, 5_000_000 + 4000 * max(since)

    def seconds(self, tokens: int) -> float:
        return self.start_seconds + self.each * tokens


CONSTANTS = 16_384, 512


def test_overhead_and_budget_from_lines():
    """0.010 / 20e-6 = 500 tokens. Of 30 MB nine tenths are used: (27e6 - 5e6) / 4000 = 5500 tokens."""
    device = Pretended()
    found = settled(probes(device.run, device), 30_000_000, CONSTANTS)
    assert (found.overhead, found.budget) == (500, pytest.approx(5500, abs=1))  # rounded down from near a whole number
    assert found.seconds == pytest.approx((0.010, 20e-6)) and found.bytes == pytest.approx((5e6, 4000))
    assert device.ran == [size for size in SIZES for _ in range(4)]  # each once more than is timed
    assert found.in_words() == (
        f"at most {found.budget:,} tokens per micro-batch; a micro-batch has the overhead of 500 tokens "
        "(10 ms, and 20 us per token)"
    )


def test_no_more_tokens_than_the_constant():
    device = Pretended()
    assert settled(probes(device.run, device), 10**12, CONSTANTS).budget == 16_384


def test_sizes_that_do_not_fit_are_left_out():
    device = Pretended(most=SIZES[1])
    found = probes(device.run, device)
    assert [tokens for tokens, _, _ in found] == list(SIZES[:2])
    assert settled(found, 30_000_000, CONSTANTS).overhead == 500


@pytest.mark.parametrize("found", [[], [(512, 0.1, 10)]])
def test_one_size_leaves_the_constants(found):
    settings = settled(found, 10**9, CONSTANTS)
    assert (settings.budget, settings.overhead) == CONSTANTS and "two sizes" in settings.in_words()


@pytest.mark.parametrize("seconds", [(0.110, 0.109, 0.108, 0.106), (0.110, 0.110, 0.110, 0.110)])
def test_times_that_do_not_grow_mean_that_the_host_limits(seconds):
    """A line that falls would be noise: the best one that does not has the mean as its start."""
    found = settled([(size, each, 10 * size) for size, each in zip(SIZES, seconds, strict=True)], 10**9, CONSTANTS)
    assert found.overhead == 16_384 and found.seconds == pytest.approx((sum(seconds) / 4, 0.0), abs=1e-9)
    assert found.is_host_bound and "the host limits the speed" in found.in_words()


def test_a_line_that_begins_below_zero_begins_at_zero():
    """Of points 10 us apart per token, but for 5 ms less at the smallest, the slope through zero is 10.1 us."""
    found = settled([(1000, 0.005, 10), (2000, 0.020, 20), (3000, 0.030, 30)], 10**9, CONSTANTS)
    assert found.overhead == 0 and found.seconds == (0.0, pytest.approx((5 + 40 + 90) / 14 * 1e-6))


class Unlike(Pretended):
    """Sizes up to the largest that is measured seem to be free, and beyond it each token costs much."""

    def seconds(self, tokens: int) -> float:
        return 0.110 + 100e-6 * max(0, tokens - SIZES[-1])


@pytest.mark.parametrize(
    ("device", "overhead", "words"),
    [
        (Pretended(0.110, 9e-6), 12_222, "the host limits the speed, since a micro-batch takes 110 ms, and 9 us"),
        (Pretended(0.110, 0.0), 16_384, "the host limits the speed"),
        (Unlike(), 512, "the default, as the measured overhead of 16,384 tokens saves nothing (a step of "),
        (Pretended(0.01024), 512, "the default, as the measured one divides a step in the same way"),
        (Pretended(0.110, 9e-6, most=SIZES[-1]), 512, "memory does not suffice for a step that is divided less"),
    ],
)
def test_the_measured_overhead_counts_only_where_a_step_is_quicker(device, overhead, words):
    """So no run is slower than with the constants: here 128 examples, as of 32 clients."""
    found = settled(probes(device.run, device), 10**12, CONSTANTS)
    lengths = calibration.lengths_of(128)
    chosen = tried(found, device.run, device, lengths, CONSTANTS[1])
    assert chosen.overhead == overhead and words in chosen.in_words()

    def step(overhead: int) -> float:
        batches = plan(lengths, chosen.budget, overhead)
        return sum(device.seconds(len(batch) * max(lengths[i] for i in batch)) for batch in batches)

    assert step(chosen.overhead) <= step(CONSTANTS[1])
    assert ("kept" in chosen.as_json()) == (overhead == CONSTANTS[1])


def test_lengths_of_a_step_are_those_of_a_log_normal_distribution():
    lengths = calibration.lengths_of(32)
    assert lengths == sorted(lengths) and len(lengths) == 32
    assert lengths[15] < 80 < lengths[16] and lengths[0] > 20 and lengths[-1] < 300


def test_on_a_cpu_nothing_is_run(monkeypatch):
    monkeypatch.setattr(calibration, "_training", lambda model: pytest.fail("it ran"))
    model = AdaptedModel(tiny.build("llama"), LORA)
    assert calibrate(model) is None and (model.most_tokens, model.overhead) == (1024, 32)


def test_what_is_timed_is_a_forward_and_a_backward_pass():
    """Under dropout, of as many tokens as it is asked for; no random number of the process is used up."""
    seen: list[torch.Size] = []
    model = tiny.build("llama", max_position_embeddings=calibration.LENGTH)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    adapted, before = AdaptedModel(model, LORA), torch.get_rng_state()
    banks = []
    with pytest.MonkeyPatch.context() as patch:
        real = AdaptedModel.bank
        patch.setattr(AdaptedModel, "bank", lambda self, rows: banks.append(real(self, rows)) or banks[0])
        run = calibration._training(adapted)
        banks[0].rows.fill_(0.1)
        run([calibration.LENGTH] * 4)
    assert seen == [torch.Size([512 // calibration.LENGTH, calibration.LENGTH])]
    assert banks[0].grads.count_nonzero() > 0 and torch.equal(before, torch.get_rng_state())


def test_what_was_measured_decides_the_packing(monkeypatch):
    asked: list[tuple[int, int]] = []
    real = inference.plan

    def planned(lengths, budget, overhead):
        asked.append((budget, overhead))
        return real(lengths, budget, overhead)

    monkeypatch.setattr(inference, "plan", planned)
    model = AdaptedModel(tiny.build("llama"), LORA, packing=(77, 5))
    inference.mean_losses(model, model.bank(1), [(0, tiny.examples(0, [9, 12]))])
    assert asked == [(77, 5)] and model.within_memory(lambda budget: budget) == 77


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_measured():
    model = tiny.build("llama", max_position_embeddings=calibration.LENGTH).to("cuda")
    found = calibrate(AdaptedModel(model, LORA))
    assert found is not None and 1 <= found.budget <= 16_384 and 0 <= found.overhead <= 16_384
    assert found.in_words()
