"""How many micro-batches of a run would be replayed on a GPU, counted on a CPU, where the pass itself runs again.

    python scripts/bench/replays.py [--clients 8 32 100] [--steps 20 200]

Each client takes steps on four texts of a log-normal length around 80 tokens, at most 512, a fifth of them targets, in
rounds of 20 steps, without padding, in micro-batches of at most 16,384 tokens. The base is so small that only the
shapes matter.
"""

from __future__ import annotations

import argparse
import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llm_fed.basics.rng import generator
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.capture import Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Work
from llm_fed.models.lora import Lora, draw
from llm_fed.tasks.common import Encoded

ROUND, BATCH, MOST, BUDGET = 20, 4, 512, 16384
LORA = Lora(rank=1, alpha=1, dropout=0.0, target_modules=("q_proj",))


def texts(draws: torch.Generator) -> list[Encoded]:
    """A batch."""
    spread = torch.randn(BATCH, generator=draws) / 2 + math.log(80)
    lengths = [min(MOST, max(16, int(length))) for length in spread.exp().tolist()]
    return [Encoded([1] * length, [n >= length - length // 5 for n in range(length)]) for length in lengths]


def counted(clients: int, steps: int) -> tuple[Work, int]:
    """What was processed, and how many shapes there were."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=MOST,
    )  # fmt: skip
    captures = Captures()
    model = AdaptedModel(
        LlamaForCausalLM(config), LORA, budget=BUDGET, captures=captures, padding_free=PaddingFree(forced=False)
    )
    start, total = draw(model.model, LORA, generator(0)), Work()
    draws = generator(0, "texts")
    for _ in range(steps // ROUND):
        jobs = [
            Fit.on(f"c{k}", LORA, start, [texts(draws) for _ in range(ROUND)], Optimizer(1e-3)) for k in range(clients)
        ]
        total = total.plus(fit(model, jobs)[1])
    (stage,) = captures._stages.values()
    return total, len(stage._slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32, 100])
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 200])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| clients | steps | micro-batches | replayed, % | shapes | tokens with padding / without |")
    print("|---:|---:|---:|---:|---:|---:|")
    for clients in given.clients:
        for steps in given.steps:
            work, shapes = counted(clients, steps)
            share = 100 * work.replayed / work.micro_batches
            print(
                f"| {clients} | {steps} | {work.micro_batches} | {share:.0f} | {shapes} | "
                f"{work.padded / work.tokens:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
