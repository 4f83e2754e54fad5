"""Steps and answers on a device that computes nothing (`scripts/bench/pretended.py`): what each launches and waits for.

In a process of its own, as torch takes one such device for good.
"""

import inspect
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tiny
import torch
from stock_training import cohort
from torch import Tensor
from torch.nn.attention import varlen

from llm_fed.basics.rng import Secret
from llm_fed.engine import capture, end_to_end, fit, inference
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.continuous import RunningBatch
from llm_fed.engine.fit import FusedFit
from llm_fed.engine.generation import generate, option_log_likelihoods
from llm_fed.method.requests import Distillation, Fit, PerExample
from llm_fed.models.lora import Lora
from llm_fed.testing.tiny import language_base

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))
from pretended import DEVICE, Pretended, attention, moved  # noqa: E402

LORA = Lora(rank=3, alpha=5, dropout=0.0, target_modules=("q_proj", "v_proj"))
ROUTED = LORA.with_experts("one", "two", gate="router")


def jobs(structure: Lora = LORA, dtype: torch.dtype = torch.float32, **settings: Any) -> list[Fit]:
    """Of one learning rate, so that they step together."""
    made = cohort(tiny.build("llama"), structure, dtype, **settings)
    return [replace(job, optimizer=replace(job.optimizer, lr=0.1)) for job in made]


def watching(device: Pretended, passed: Callable[..., None], never: str = "") -> tuple[Callable[..., None], list[int]]:
    """The same pass, which launches `never` not once, and how many tensors of the host each call of it read."""
    read: list[int] = []

    def watched(*given: Any) -> None:
        before = device.from_host
        passed(*given)
        read.append(device.from_host - before)
        assert not device.launches[never], never

    return watched, read


def step(jobs: Sequence[Fit], number: int = 0) -> tuple[int, int]:
    """The last of the first steps up to this one."""
    with Pretended() as device:
        fused = FusedFit(AdaptedModel(moved(tiny.build("llama")), jobs[0].structure, budget=1000), jobs)  # type: ignore[arg-type]
        losses = torch.zeros(len(jobs), device=DEVICE)
        watched, read = watching(device, fit.one_pass)
        with patch.object(fit, "one_pass", watched):
            for now in range(number + 1):
                device.counted()
                fused.step(now, {k: job.batch(now) for k, job in enumerate(jobs)}, losses)
        assert read and not any(read), f"passes read {read} tensors of the host"
        return device.counted()


def captured(jobs: Sequence[Fit]) -> tuple[int, int]:
    """The second step over static memory. Its passes are what a graph would hold."""
    model = AdaptedModel(tiny.build("llama"), jobs[0].structure, captures=capture.Captures())
    return replayed(model, jobs)


def as_by_default(jobs: Sequence[Fit]) -> tuple[int, int]:
    """The same in bfloat16, without padding and fused: what a GPU does unless it is asked otherwise, but for its casts,
    as the device has no autocast. Its kernels for texts and for groups of tokens are one launch each."""
    model = AdaptedModel(
        tiny.build("llama", torch.bfloat16), jobs[0].structure, captures=capture.Captures(), padding_free=True,
        fuses=True,
    )  # fmt: skip
    takes = patch.object(end_to_end, "kernel_takes", lambda *given: True)
    with takes, patch.object(varlen, "varlen_attn", varlen_attn):
        return replayed(model, jobs)


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, *given: Any, scale: Any, window_size: Any, enable_gqa: bool
) -> Tensor:
    """(S, H, D), as torch's."""
    return attention(query, key, value)  # type: ignore[no-any-return]


def replayed(model: AdaptedModel, jobs: Sequence[Fit]) -> tuple[int, int]:
    with Pretended() as device:
        fused = FusedFit(replace(model, model=moved(model.model), budget=1000), jobs)
        losses = torch.zeros(len(jobs), device=DEVICE)
        watched, read = watching(device, capture.one_pass, "select_backward")  # zeros are filled in, to be copied over
        # The device has no generators; what a mask holds does not matter here.
        draw = patch.object(AdapterBank, "draw_masks", lambda bank, seeds, lengths, out, **more: out)
        with patch.object(capture, "one_pass", watched), draw:
            for now in range(2):
                device.counted()
                fused.step(now, {k: job.batch(now) for k, job in enumerate(jobs)}, losses)
        assert read and not any(read), f"captured passes read {read} tensors of the host"
        return device.counted()


def answers(prompts: Sequence[list[int]], tokens: int, captures: capture.Captures | None = None) -> tuple[int, int]:
    """So many tokens of answers to prompts, each under its own adapter. What is read is 0, which ends no answer."""
    with Pretended() as device:
        base = language_base(moved(tiny.build("llama")))  # type: ignore[arg-type]
        bank = AdapterBank(base.model, LORA, len(prompts))
        device.counted()
        # Fake tensors do not work in inference mode.
        plain = {name: inspect.unwrap(getattr(RunningBatch, name)) for name in ("read", "step")}
        with torch.no_grad(), patch.multiple(RunningBatch, **plain):
            inspect.unwrap(generate)(
                base, bank, list(enumerate(prompts)), max_new_tokens=tokens, batch_size=8, captures=captures,
            )  # fmt: skip
        return device.counted()


def options(each: int) -> tuple[int, int]:
    """So many options of two tokens after each of three prompts, in one batch."""
    with Pretended() as device:
        base = language_base(moved(tiny.build("llama")))  # type: ignore[arg-type]
        asked = [(n, [5, 6, n], [[7, k] for k in range(each)]) for n in range(3)]
        bank = AdapterBank(base.model, LORA, len(asked))
        device.counted()
        with torch.no_grad():
            inspect.unwrap(option_log_likelihoods)(base, bank, asked, batch_size=100)
        return device.counted()


def losses(budget: int) -> tuple[int, int]:
    """Of three examples, in micro-batches of so many tokens."""
    with Pretended() as device:
        model = AdaptedModel(moved(tiny.build("llama")), LORA, budget=budget)  # type: ignore[arg-type]
        bank = model.bank(1)
        device.counted()
        with torch.no_grad():
            inspect.unwrap(inference.mean_losses)(model, bank, [(0, tiny.examples(3, [9, 9, 9]))])
        return device.counted()


def write(path: str) -> None:
    """JSON: launches and waits of all cases; or the error that ends the process."""
    try:
        text = json.dumps({name: case() for name, case in cases().items()})
    except BaseException:
        Path(path).write_text(traceback.format_exc())
        raise
    Path(path).write_text(text)


def cases() -> dict[str, Callable[[], tuple[int, int]]]:
    plain = jobs()
    pupil = replace(plain[0], loss=Distillation([job.start for job in plain[1:]]))
    return {
        "one client": lambda: step(plain[:1], number=1),
        "three clients": lambda: step(plain, number=1),
        "one client, clipped": lambda: step(jobs(clip=1.0, clients=[0]), number=1),
        "three clients, clipped": lambda: step(jobs(clip=1.0), number=1),
        "private": lambda: step([replace(job, private=PerExample(0.5, 0.3, 4.0, Secret.fresh())) for job in plain]),
        "teachers": lambda: step([pupil]),
        "captured, router": lambda: captured(jobs(ROUTED)),
        "as by default": lambda: as_by_default(jobs(replace(LORA, rank=8), dtype=torch.bfloat16)),
        "answers of unequal prompts": lambda: answers([[5, 6, 7], [8, 9], [3]], 2),
        "answers, captured": lambda: answers([[5, 6, 7], [8, 9], [3]], 2, capture.Captures()),
        "scores of three options": lambda: options(1),
        "scores of twelve options": lambda: options(4),
        "scores in one pass": lambda: losses(100),
        "scores in three passes": lambda: losses(9),
    }
