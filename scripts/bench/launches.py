"""Counts what a training step asks of a GPU: launches, and times that the host waits for it. Needs no GPU.

One optimizer step of LoRA (r = 8, query and value) on a LLaMA of eight layers, batch 4, lengths 40 to 120, no dropout:
ours; stock PEFT, one client after another; and the floor, one adapter on everybody's examples. A launch is an operation
of torch that is no view; those on lists of tensors, as of optimizers, are one each, where a GPU takes a few.

    python scripts/bench/launches.py [--clients 1 8 32 100] [--clip 1.0]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from pretended import DEVICE, Pretended, moved
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from llm_fed.basics.rng import generator
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.fit import FusedFit
from llm_fed.engine.memory import budget_and_overhead
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.models.lora import Lora, draw
from llm_fed.tasks.common import Encoded

LORA = Lora(rank=8, alpha=16, dropout=0.0, target_modules=("q_proj", "v_proj"))
WORDS, BATCH = 500, 4


class Counts(NamedTuple):
    """Of one optimizer step."""

    micro_batches: int
    launches: int
    waits: int


@dataclass(frozen=True)
class OneMicroBatch(AdaptedModel):
    """However much padding that takes, as long as memory allows it."""

    @property
    def overhead(self) -> int:
        return 10**9


def base(layers: int) -> nn.Module:
    """Of any width: it does not change what is counted."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=layers, **sizes))


def batches(clients: int) -> list[list[Encoded]]:
    """Of each client; a fifth of an example is the response."""
    draws = generator(0, "examples")
    lengths = torch.randint(40, 121, (clients, BATCH), generator=draws).tolist()
    return [
        [Encoded([7] * length, [False] * (length - length // 5) + [True] * (length // 5)) for length in own]
        for own in lengths
    ]


def ours(args: argparse.Namespace, clients: int, kind: type[AdaptedModel] = AdaptedModel) -> Counts:
    """The second step of the fused cohort."""
    model, seen = base(args.layers), dict(enumerate(batches(clients)))
    jobs = [
        Fit.on(f"{k}", LORA, draw(model, LORA, generator(0, k)), [batch] * 2, Optimizer(1e-3, clip=args.clip))
        for k, batch in seen.items()
    ]
    with Pretended() as device:
        fused = FusedFit(kind(moved(model), LORA, budget=budget_and_overhead(DEVICE)[0]), jobs)
        losses = torch.zeros(2, clients, device=DEVICE)
        fused.step(0, seen, losses[0])
        device.counted()
        fused.step(1, seen, losses[1])
    return Counts(fused.work.micro_batches // 2, *device.counted())


def stock(args: argparse.Namespace, batch: Sequence[Encoded]) -> Counts:
    """The second step of stock PEFT, with transformers' own loss and torch's fused AdamW."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(LORA.target_modules))
    ids = [torch.tensor(example.input_ids) for example in batch]
    labels = [i.masked_fill(~torch.tensor(e.target), -100) for i, e in zip(ids, batch, strict=True)]
    inputs = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }
    peft = get_peft_model(base(args.layers), config)
    with Pretended() as device:
        moved(peft)
        trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        for _ in range(2):
            device.counted()
            peft(**{name: tensor.to(DEVICE) for name, tensor in inputs.items()}, use_cache=False).loss.backward()
            if args.clip is not None:
                nn.utils.clip_grad_norm_(trained, args.clip)
            optimizer.step()
            optimizer.zero_grad()
        return Counts(1, *device.counted())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 100])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--clip", type=float, help="largest gradient norm (default: no clipping)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    args = parser.parse_args()
    rows = [row(args, clients) for clients in args.clients]
    if args.json:
        print(json.dumps([{name: counts._asdict() for name, counts in each.items()} for each in rows]))
        return
    print(f"| clients | {' | '.join(rows[0])} |\n|---|{'---|' * len(rows[0])}")
    for clients, each in zip(args.clients, rows, strict=True):
        cells = (f"{counts.launches:,} ({counts.micro_batches}), {counts.waits}" for counts in each.values())
        print(f"| {clients} | {' | '.join(cells)} |")
    print("\nEach cell: launches (micro-batches, of stock PEFT passes), waits.")


def row(args: argparse.Namespace, clients: int) -> dict[str, Counts]:
    """By variant. Stock PEFT's clients all take the same, so one of them is counted."""
    examples = batches(clients)
    alone = stock(args, examples[0])
    return {
        "ours, one micro-batch": ours(args, clients, OneMicroBatch),
        "ours, as planned for a GPU": ours(args, clients),
        "stock PEFT, one by one": Counts(*(clients * count for count in alone)),
        "floor: one adapter": stock(args, [example for batch in examples for example in batch]),
    }


if __name__ == "__main__":
    main()
