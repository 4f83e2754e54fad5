"""Predicts how long a training step takes on GPUs that were not there to measure, from formulas alone: a lower bound.

A step of a cohort is a few micro-batches, as the packing plans them. Each takes at least as long as its products at the
card's peak, as its bytes at the card's bandwidth, and as its launches; the longest of the three counts. Unpacking 4-bit
weights comes before their products, so its bytes are added.

    python scripts/bench/roofline.py                              # the table of docs/results/log/roofline.md
    python scripts/bench/roofline.py --base BASE --data FLAN      # the same formulas against a measurement on this CPU
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import formula
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llm_fed.basics.rng import generator
from llm_fed.engine.footprint import training_copies
from llm_fed.engine.memory import budget_and_overhead
from llm_fed.engine.packing import plan
from llm_fed.models.lora import Lora, layout
from llm_fed.settings.config import LocalConfig

LORA = Lora(rank=8, alpha=16, dropout=0.0, target_modules=("q_proj", "v_proj"))
BATCH = 4  # examples of a client in a step
SHAPES: dict[str, dict[str, Any]] = {  # of meta-llama/Llama-3.2-3B and meta-llama/Llama-3.1-8B, by their config.json
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip
# Kernels of a micro-batch and a step as scripts/bench/launches.py counts them in float32: 994 + 4 of eight layers and
# 262 + 4 of two, hence 122 for a layer. Assumed: 5 us each, and in 4 bits two more for each of a layer's seven linear
# layers, in the forward and in the backward pass.
LAUNCH, PER_LAYER, AROUND, PER_STEP, UNPACKING = 5e-6, 122, 18, 4, 2 * 2 * 7


@dataclass(frozen=True)
class Card:
    """Published peaks: dense products in bfloat16 with sums in float32 (FLOP/s), memory bandwidth (bytes/s), memory."""

    flops: float
    bandwidth: float
    memory: float


CARDS = {
    "H100": Card(
        989.4e12, 3.35e12, 80e9
    ),  # SXM5: NVIDIA H100 Tensor Core GPU datasheet, half of the figure "with sparsity"
    "A40": Card(149.7e12, 696e9, 48e9),  # NVIDIA A40 datasheet
    "24 GB": Card(165.2e12, 1008e9, 24e9),  # GeForce RTX 4090: NVIDIA Ada GPU Architecture whitepaper, appendix A
}


@dataclass(frozen=True)
class Work:
    """Of one micro-batch."""

    flops: float
    bytes: float
    unpacking: float  # bytes
    launches: int

    def parts(self, card: Card, launch: float = LAUNCH) -> dict[str, float]:
        """Seconds by what they are spent on; the longest is the bound."""
        unpacking = self.unpacking / card.bandwidth
        products, bytes = self.flops / card.flops + unpacking, self.bytes / card.bandwidth + unpacking
        return {"products": products, "bytes": bytes, "launches": launch * self.launches}

    def seconds(self, card: Card, launch: float = LAUNCH) -> float:
        return max(self.parts(card, launch).values())


class Shape:
    """A base of these shapes, without weights, under LORA.

    Args:
        bits: of a weight of a layer; 4: nf4 with double quantisation, where embeddings and head keep `size` bytes.
        autocast: what is computed in; None: float32.
    """

    def __init__(self, model: Any, bits: int, autocast: torch.dtype | None):
        decoder, kept = formula.Decoder.of(model), formula.kept(model, LORA, autocast, False)
        assert decoder and kept, "the formulas are of LLaMA- and Qwen-like models"
        self.decoder, self.kept, self.bits = decoder, kept, bits
        self.size = 4 if autocast is None else autocast.itemsize
        self.head = model.get_output_embeddings().weight.numel()
        linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.inner = sum(m.weight.numel() for m in linear) - self.head  # weights of the layers' products
        self.others = sum(p.numel() for p in model.parameters()) - self.inner
        self.adapter = layout(model, LORA).size

    @property
    def base(self) -> float:
        """Bytes of the weights. In nf4 each block of 64 has a scale of 8 bits, and each 256 of these one of 32."""
        packed = 0.5 + 1 / 64 + 4 / (64 * 256)
        return self.others * self.size + self.inner * (packed if self.bits == 4 else self.size)

    def memory(self, clients: int, rows: int, length: int) -> float:
        """Bytes of a step: weights, adapters with AdamW's moments, activations of the largest micro-batch."""
        training = 4 * training_copies(LORA, LocalConfig(), clients) * self.adapter
        return self.base + training + self.kept.peak(rows, length, rows * (length // 5))

    def work(self, lengths: Sequence[int]) -> Work:
        """Of the examples of a micro-batch, a fifth of each being the response.

        Products: forward 2 for each weight and token, and 2 more for the gradient of the layer's input, as the base is
        frozen. The head sees only the response. An adapter has gradients of its own, too: 6 in all. Attention is
        causal, and its backward pass does five products where the forward pass does two.
        """
        rows, length = len(lengths), max(lengths)
        tokens, targets = rows * length, sum(n // 5 for n in lengths)
        attention = 3.5 * 2 * length * self.decoder.queries * self.decoder.layers * tokens
        flops = 4 * self.inner * tokens + 4 * self.head * targets + 6 * self.adapter * tokens + attention
        # Both passes read the weights, and what is kept is written and read; packed weights are written out before.
        bytes = 2 * self.size * (self.inner + self.head) + 2 * self.kept.bytes(rows, length, targets)
        unpacking = 2 * (0.5 + self.size) * self.inner if self.bits == 4 else 0.0
        launches = PER_LAYER + (UNPACKING if self.bits == 4 else 0)
        return Work(flops, bytes, unpacking, launches * self.decoder.layers + AROUND)


def drawn(clients: int) -> list[int]:
    """Lengths of a step's examples: log-normal around 80 tokens, as those of scripts/bench/cohort.py."""
    draws = generator(0, "examples")
    lengths = torch.empty(clients * BATCH).log_normal_(4.4, 0.5, generator=draws)
    return lengths.clamp(16, 512).int().tolist()


def planned(shape: Shape, card: Card, lengths: Sequence[int], clients: int) -> list[list[int]] | None:
    """Micro-batches under a GPU's constants, halved until they fit nine tenths of it; None: not even one example."""
    budget, overhead = budget_and_overhead(torch.device("cuda"))
    while budget:
        parts = plan(lengths, budget, overhead)
        held = max(shape.memory(clients, len(part), max(lengths[i] for i in part)) for part in parts)
        if held <= 0.9 * card.memory:
            return parts
        budget //= 2
    return None


def table() -> None:
    print(
        "| shape | weights | clients | tokens | "
        + " | ".join(f"{name}: s (micro-batches), bound" for name in CARDS)
        + " |"
    )
    print("|---" * (4 + len(CARDS)) + "|")
    for name, sizes in SHAPES.items():
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        for bits in (16, 4):
            shape = Shape(model, bits, torch.bfloat16)
            for clients in (1, 8, 32):
                lengths = drawn(clients)
                cells = [cell(shape, card, lengths, clients) for card in CARDS.values()]
                weights = f"{'bf16' if bits == 16 else 'nf4'}, {shape.base / 1e9:.1f} GB"
                print(f"| {name} | {weights} | {clients} | {sum(lengths):,} | {' | '.join(cells)} |")


def cell(shape: Shape, card: Card, lengths: Sequence[int], clients: int) -> str:
    parts = planned(shape, card, lengths, clients)
    if parts is None:
        return "does not fit"
    work = [shape.work([lengths[i] for i in part]) for part in parts]
    seconds = sum(each.seconds(card) for each in work) + PER_STEP * LAUNCH
    sums = {name: sum(each.parts(card)[name] for each in work) for name in work[0].parts(card)}
    return f"{seconds:.3f} ({len(parts)}), {max(sums, key=lambda name: sums[name])}"


def best(run: Callable[[], object], repeats: int = 7) -> float:
    """The fewest CPU seconds of a few tries, which other load on the machine disturbs least."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        taken.append(time.process_time() - began)
    return min(taken)


def this_cpu(shape: Shape) -> Card:
    """Its peaks on one thread: a product as large as those of the shape, and a copy beyond its caches."""
    tokens, hidden, inner = 512, shape.decoder.hidden, shape.decoder.intermediate
    left, right, large = torch.randn(tokens, hidden), torch.randn(inner, hidden), torch.randn(64_000_000)
    flops = 2 * tokens * hidden * inner * 20 / best(lambda: [nn.functional.linear(left, right) for _ in range(20)])
    other = torch.empty_like(large)
    return Card(flops, 2 * large.nbytes / best(lambda: other.copy_(large)), 0)


def check(base: str, data: str, steps: int) -> None:
    """Predicted and measured CPU seconds of scripts/bench/cohort.py's cohort, on one thread."""
    from cohort import Bench

    torch.set_num_threads(1)
    given = {"device": "cpu", "dtype": "float32", "dropout": 0.0, "clients": 8, "batch_size": BATCH, "lr": 5e-4}
    bench = Bench(argparse.Namespace(base=base, data=data, shapes=None, budget=None, steps=[steps], **given))
    shape = Shape(bench.model, 32, None)
    card, (budget, overhead) = this_cpu(shape), budget_and_overhead(torch.device("cpu"))
    flops = bytes = predicted = 0.0
    for batches in zip(*bench.cohort(steps), strict=True):
        lengths = [len(example.input_ids) for batch in batches for example in batch]
        for part in plan(lengths, budget, overhead):
            work = shape.work([lengths[i] for i in part])
            flops, bytes, predicted = flops + work.flops, bytes + work.bytes, predicted + work.seconds(card, 0)
    measured = best(lambda: bench.ours(steps), 3)
    print(f"peaks: {card.flops / 1e9:.1f} GFLOP/s, {card.bandwidth / 1e9:.1f} GB/s")
    print(f"{steps} steps: {flops / 1e9:.0f} GFLOP, {bytes / 1e9:.1f} GB")
    print(f"predicted {predicted:.2f} s, measured {measured:.2f} s: {measured / predicted:.2f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a folder with a model and its tokenizer, for a check on this CPU; needs --data")
    parser.add_argument("--data", help="a folder with one folder per client, each with train*.jsonl.gz")
    parser.add_argument("--steps", type=int, default=4, help="local steps of the check")
    args = parser.parse_args()
    if bool(args.base) != bool(args.data):
        parser.error("--base and --data belong together")
    if args.base:
        check(args.base, args.data, args.steps)
    else:
        table()


if __name__ == "__main__":
    main()
