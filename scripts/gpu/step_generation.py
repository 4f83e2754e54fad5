"""Answers of a cohort, each under its own adapter, beside `generate` of stock PEFT, one client after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from cohort import Bench
from peer_loops import entry_of_peft
from peft import set_peft_model_state_dict
from setting import Benches, Setting
from steps import STEPS
from torch.nn.utils.rnn import pad_sequence

from llm_fed.basics.rng import generator
from llm_fed.engine import generation
from llm_fed.engine.batch_limits import BatchLimit, most_rows
from llm_fed.engine.capture import Captures
from llm_fed.kinds.language import Language
from llm_fed.models.prompt import Prompt
from llm_fed.tasks.common import Template
from llm_fed.testing.tiny import VOCABULARY, language_base

ANSWERS, NEW_TOKENS = 130, 64  # per client; of an answer
ROWS_OF_STOCK = 32  # of a batch of `generate`
Prompts = list[list[list[int]]]  # token ids by client


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    benches = Benches(setting)
    return {case: lambda case=case: measured(setting, benches, case) for case in STEPS["generation"].cases}  # type: ignore[misc]


def measured(setting: Setting, benches: Benches, case: str) -> dict[str, Any]:
    base, who = case.split(", ", 1)
    bench = benches.of(base)
    prompts, tokens = prompts_of(bench, 3 if setting.tiny else ANSWERS), 4 if setting.tiny else NEW_TOKENS
    ways = {
        "ours": captured, "ours, prompts without padding": partial(captured, end_to_end=True), "ours, as written": ours,
        "ours, in batches": in_batches,
    }  # fmt: skip
    answer: Any = ways.get(who, stock)
    answer(bench, [client[:1] for client in prompts], tokens)  # a warm-up
    if answer is stock:
        prompts = prompts[:1]  # of one client, as those of the others take as long
    count, rows = sum(map(len, prompts)), ROWS_OF_STOCK
    if answer is not stock:
        longest = max(len(prompt) for client in prompts for prompt in client)
        rows = min(count, BatchLimit(base_of(bench, tokens), rows_of(setting), tokens).rows(longest))

    def timed() -> dict[str, Any]:
        seconds = setting.once(lambda: answer(bench, prompts, tokens))
        speed = round(count * tokens / seconds)
        return {"answers": count, "rows": rows, "seconds": round(seconds, 2), "tokens_per_second": speed}

    return setting.with_peak(timed)


def prompts_of(bench: Bench, count: int) -> Prompts:
    """Log-normal lengths around 80 tokens, as those of training."""
    draws = generator(1, "prompts")

    def prompt() -> list[int]:
        length = int(torch.empty(()).log_normal_(4.4, 0.5, generator=draws).clamp(16, 512))
        return torch.randint(2, VOCABULARY, (length,), generator=draws).tolist()

    return [[prompt() for _ in range(count)] for _ in range(bench.args.clients)]


def base_of(bench: Bench, tokens: int) -> Language:
    base = language_base(bench.model, autocast=bench.autocast)
    base.prompt = Prompt(Template("plain", "{prompt}"), (), tokens)  # random weights would end an answer by chance
    return base


def rows_of(setting: Setting) -> int:
    """As a run has them where `eval.batch_size` says nothing."""
    return most_rows(None, setting.device)


@torch.inference_mode()
def ours(
    bench: Bench, prompts: Prompts, tokens: int, captures: Captures | None = None, *, end_to_end: bool = False
) -> None:
    """One batch holds rows of any clients."""
    bank = bench.adapted(bench.structure).bank(len(prompts))
    for row, start in enumerate(bench.starts):
        bank.load(row, start)
    asked = [(row, prompt) for row, client in enumerate(prompts) for prompt in client]
    generation.generate(
        base_of(bench, tokens), bank, asked, max_new_tokens=tokens,
        batch_size=most_rows(None, bench.model.device), captures=captures, fuses=captures is not None,
        end_to_end=end_to_end,
    )  # fmt: skip


def captured(bench: Bench, prompts: Prompts, tokens: int, *, end_to_end: bool = False) -> None:
    captures = Captures()
    ours(bench, prompts, tokens, captures, end_to_end=end_to_end)
    if captures.said:
        raise RuntimeError("; ".join(captures.said))


def in_batches(bench: Bench, prompts: Prompts, tokens: int) -> None:
    with patch.object(generation, "allowed", lambda base: False):
        ours(bench, prompts, tokens)


@torch.inference_mode()
def stock(bench: Bench, prompts: Prompts, tokens: int) -> None:
    """A client's adapter after another, its prompts sorted by length."""
    peft: Any = bench.wrapped().eval()
    peft.generation_config.eos_token_id = None
    for start, client in zip(bench.starts, prompts, strict=False):
        set_peft_model_state_dict(peft, {entry_of_peft(name): start[name].clone() for name in start})
        ordered = sorted(client, key=len, reverse=True)
        for at in range(0, len(ordered), ROWS_OF_STOCK):
            rows = [torch.tensor(prompt) for prompt in ordered[at : at + ROWS_OF_STOCK]]
            ids = pad_sequence(rows, batch_first=True, padding_side="left").to(bench.args.device)
            with bench.context():
                out = peft.generate(
                    input_ids=ids, attention_mask=ids.ne(0).long(), do_sample=False, pad_token_id=0,
                    max_new_tokens=tokens,
                )  # fmt: skip
            if out.shape[1] != ids.shape[1] + tokens:
                raise RuntimeError(f"generate made {out.shape[1] - ids.shape[1]} tokens instead of {tokens}")
    peft.unload()
