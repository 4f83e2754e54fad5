"""Answers of a cohort, each under its own adapter, beside `generate` of stock PEFT, one client after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cohort import Bench
from peer_loops import entry_of_peft
from peft import set_peft_model_state_dict
from setting import Benches, Setting
from steps import STOCK, WRITTEN
from torch.nn.utils.rnn import pad_sequence

from llm_fed.basics.rng import generator
from llm_fed.engine import generation
from llm_fed.engine.capture import Captures
from llm_fed.engine.generation import most_rows
from llm_fed.models.prompt import Prompt
from llm_fed.tasks.common import Template
from llm_fed.testing.tiny import VOCABULARY, language_base

ANSWERS, NEW_TOKENS = 130, 64  # per client; of an answer
ROWS_OF_STOCK = 32  # of a batch of `generate`
Prompts = list[list[list[int]]]  # token ids by client


def measures(setting: Setting) -> Callable[[str], dict[str, Any]]:
    benches = Benches(setting)
    return lambda case: measured(setting, benches, *case.split(", ", 1))


def measured(setting: Setting, benches: Benches, base: str, who: str) -> dict[str, Any]:
    bench, tokens = benches.of(base), 4 if setting.tiny else NEW_TOKENS
    prompts = prompts_of(bench, 3 if setting.tiny else ANSWERS)
    if who == STOCK:
        prompts = prompts[:1]  # of one client, as those of the others take as long

    def answer(prompts: Prompts) -> None:
        if who == STOCK:
            stock(bench, prompts, tokens)
        else:
            ours(bench, prompts, tokens, None if who == WRITTEN else Captures())

    answer([client[:1] for client in prompts])  # a warm-up
    count = sum(map(len, prompts))

    def timed() -> dict[str, Any]:
        seconds = setting.once(lambda: answer(prompts))
        speed = round(count * tokens / seconds)
        return {"answers": count, "seconds": round(seconds, 2), "tokens_per_second": speed}

    return setting.with_peak(timed)


def prompts_of(bench: Bench, count: int) -> Prompts:
    """Log-normal lengths around 80 tokens, as those of training."""
    draws = generator(1, "prompts")

    def prompt() -> list[int]:
        length = int(torch.empty(()).log_normal_(4.4, 0.5, generator=draws).clamp(16, 512))
        return torch.randint(2, VOCABULARY, (length,), generator=draws).tolist()

    return [[prompt() for _ in range(count)] for _ in range(bench.args.clients)]


@torch.inference_mode()
def ours(bench: Bench, prompts: Prompts, tokens: int, captures: Captures | None) -> None:
    """One batch holds rows of any clients."""
    base = language_base(bench.model, autocast=bench.autocast)
    base.prompt = Prompt(Template("plain", "{prompt}"), (), tokens)  # random weights would end an answer by chance
    bank = bench.adapted(bench.structure).bank(len(prompts))
    for row, start in enumerate(bench.starts):
        bank.load(row, start)
    asked = [(row, prompt) for row, client in enumerate(prompts) for prompt in client]
    generation.generate(
        base, bank, asked, max_new_tokens=tokens, batch_size=most_rows(None, bench.model.device), captures=captures,
        fuses=captures is not None,
    )  # fmt: skip
    if captures and captures.said:
        raise RuntimeError("; ".join(captures.said))


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
            options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens}
            with bench.context():
                out = peft.generate(input_ids=ids, attention_mask=ids.ne(0).long(), **options)
            if out.shape[1] != ids.shape[1] + tokens:
                raise RuntimeError(f"generate made {out.shape[1] - ids.shape[1]} tokens instead of {tokens}")
    peft.unload()
