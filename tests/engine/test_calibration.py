"""How packing is measured, with a pretended device: its clock and its memory follow lines that are known."""

from __future__ import annotations

import pytest
import tiny
import torch

from llm_fed.engine import calibration, inference
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.calibration import SIZES, calibrate, probes, settled
from llm_fed.models.lora import Lora

LORA = Lora(2, 4, 0.1, ("q_proj", "v_proj"))


class Pretended:
    """seconds = 0.010 + 20e-6 tokens, bytes = 5e6 + 4000 tokens; the first of each size is slow, as on a GPU."""

    def __init__(self, most: int = 10**9):
        self.most, self.ran, self.seen, self.began = most, [], set(), 0

    def run(self, tokens: int) -> None:
        if tokens > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        self.ran.append(tokens)

    def start(self) -> None:
        self.began = len(self.ran)

    def stop(self) -> tuple[float, int]:
        (tokens,) = self.ran[self.began :]
        jitter = 0.0 if self.ran.count(tokens) == 3 else 0.004  # the second of three timed ones is undisturbed
        return 0.010 + 20e-6 * tokens + jitter, 5_000_000 + 4000 * tokens


def test_overhead_and_budget_from_lines():
    """0.010 / 20e-6 = 500 tokens. Of 30 MB nine tenths are used: (27e6 - 5e6) / 4000 = 5500 tokens."""
    device = Pretended()
    found = settled(probes(device.run, device), free=30_000_000, most=16_384)
    assert (found.overhead, found.budget) == (500, 5500)
    assert found.seconds == pytest.approx((0.010, 20e-6)) and found.bytes == pytest.approx((5e6, 4000))
    assert device.ran == [size for size in SIZES for _ in range(4)]  # each once more than is timed
    assert found.in_words() == (
        "at most 5,500 tokens per micro-batch; a micro-batch has the overhead of 500 tokens "
        "(10 ms, and 20 us per token)"
    )


def test_no_more_tokens_than_the_constant():
    device = Pretended()
    assert settled(probes(device.run, device), free=10**12, most=16_384).budget == 16_384


def test_sizes_that_do_not_fit_are_left_out():
    device = Pretended(most=SIZES[1])
    found = probes(device.run, device)
    assert [tokens for tokens, _, _ in found] == list(SIZES[:2])
    assert settled(found, free=30_000_000, most=16_384).overhead == 500


@pytest.mark.parametrize(
    "found", [[], [(512, 0.1, 10)], [(512, 0.1, 10), (1024, 0.1, 20)], [(512, 0.1, 10), (1024, 0.2, 10)]]
)
def test_what_does_not_grow_leaves_the_constants(found):
    assert settled(found, free=10**9, most=16_384) is None


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
        run(512)
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
def test_on_a_gpu_it_is_measured():
    model = tiny.build("llama", max_position_embeddings=calibration.LENGTH).to("cuda")
    found = calibrate(AdaptedModel(model, LORA))
    assert found is None or (1 <= found.budget <= 16_384 and 0 <= found.overhead <= 16_384)
