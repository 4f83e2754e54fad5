"""Times a fused cohort against (a) the same clients one after another with stock PEFT and (b) a floor of one plain adapter.

The floor trains ONE stock PEFT adapter on the cohort's examples, sorted by length into 1, 2, 4 or 8 micro-batches; the best
of these counts. (b') is that floor without the work that llm_fed leaves out (the language-model head on prompt tokens,
attention masks, padding beyond the plan): ours / (b') is what it costs that every row has an adapter of its own.

    python scripts/bench/cohort.py --base FOLDER --data FOLDER_OF_CLIENTS --steps 4 20 --threads 2
    python scripts/bench/cohort.py --shapes llama-3.2-3b --device cuda --dtype bfloat16 --steps 4
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from llm_fed.bank import Lora, draw
from llm_fed.config import LocalConfig
from llm_fed.errors import ClientError
from llm_fed.packing import plan
from llm_fed.rng import generator
from llm_fed.state import State
from llm_fed.tasks.common import Encoded, Example, encode
from llm_fed.training import Job, Work, budget_and_overhead, collate, fit, token_losses

SHAPES = {
    "llama-3.2-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    }
}
Cohort = list[list[list[Encoded]]]  # by client and step
Autocast = Callable[[], AbstractContextManager[None]]


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = load(args, dtype)
    structure = Lora(rank=8, alpha=16, dropout=args.dropout, target_modules=("q_proj", "v_proj"))
    starts = [draw(model, structure, generator(0, "start", k)) for k in range(args.clients)]
    autocast = None if dtype == torch.float32 else dtype
    context = partial(torch.autocast, args.device, autocast, enabled=autocast is not None)
    lora = LoraConfig(
        r=structure.rank,
        lora_alpha=16,
        lora_dropout=args.dropout,
        target_modules=list(structure.target_modules),
    )
    print(
        f"{args.base or args.shapes}, {args.clients} clients, batch {args.batch_size}, {args.dtype}, {args.device}, ",
        end="",
    )
    print(
        f"{args.threads} threads, torch {torch.__version__}; median of {args.repeats} alternating runs, seconds\n"
    )
    print(
        "| steps | ours | padding | (a) one after another | (b) floor | of micro-batches | (b') | ours/(a) | ours/(b) | ours/(b') |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for steps in args.steps:
        cohort = [client[:steps] for client in examples(args, max(args.steps))]

        def ours(cohort: Cohort = cohort) -> Work:
            jobs = [Job(f"{k}", starts[k], cohort[k], args.lr) for k in range(len(cohort))]
            results, work = fit(model, structure, jobs, LocalConfig(), autocast=autocast, budget=args.budget)
            assert not any(isinstance(result, ClientError) for result in results)
            return work

        variants: dict[str, Callable[[], object]] = {
            "ours": ours,
            "a": lambda cohort=cohort: wrapped(
                model, lora, lambda peft: one_by_one(peft, starts, cohort, args.lr, context)
            ),
            "b'": lambda cohort=cohort: wrapped(
                model, lora, lambda peft: lean_floor(peft, cohort, args, context)
            ),
        }
        for parts in (1, 2, 4, 8):
            variants[f"b{parts}"] = lambda cohort=cohort, parts=parts: wrapped(
                model, lora, lambda peft: floor(peft, cohort, parts, args.lr, context)
            )
        report(steps, variants, args.repeats, ours().padding)


def report(steps: int, variants: dict[str, Callable[[], object]], repeats: int, padding: float) -> None:
    """Time all variants in turn, again and again; of the floor's only the two that were fastest at first."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats):
        if repeat == 1:
            floors = sorted(
                (name for name in variants if name in ("b1", "b2", "b4", "b8")), key=lambda n: seconds[n][0]
            )
            variants = {name: run for name, run in variants.items() if name not in floors[2:]}
        for name, run in variants.items():
            seconds[name].append(timed(run))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    best = min((name for name in variants if name in ("b1", "b2", "b4", "b8")), key=lambda name: median[name])
    us, a, b, lean = median["ours"], median["a"], median[best], median["b'"]
    print(
        f"| {steps} | {us:.2f} | {padding:.1%} | {a:.2f} | {b:.2f} | {best[1:]} | {lean:.2f} "
        f"| {us / a:.2f} | {us / b:.2f} | {us / lean:.2f} |",
        flush=True,
    )


def timed(run: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def load(args: argparse.Namespace, dtype: torch.dtype) -> PreTrainedModel:
    if args.base:
        return AutoModelForCausalLM.from_pretrained(args.base, dtype=dtype).to(args.device)
    with torch.device(args.device):
        return LlamaForCausalLM(LlamaConfig(**SHAPES[args.shapes])).to(dtype)


def examples(args: argparse.Namespace, steps: int) -> Cohort:
    """The first steps x batch size examples of each client; random tokens of Flan-like lengths with --shapes."""
    count = steps * args.batch_size
    if args.data:
        tokenizer = AutoTokenizer.from_pretrained(args.base)
        clients = [
            flan(folder, tokenizer)[:count] for folder in sorted(Path(args.data).iterdir())[: args.clients]
        ]
    else:
        draws = generator(0, "lengths")
        clients = [[synthetic(draws) for _ in range(count)] for _ in range(args.clients)]
    return [[c[at : at + args.batch_size] for at in range(0, count, args.batch_size)] for c in clients]


def flan(folder: Path, tokenizer) -> list[Encoded]:
    with gzip.open(next(folder.glob("train*.gz")), "rt") as lines:
        records = [json.loads(line) for line in lines]
    encoded = [
        encode(
            Example(r["instruction"], (r["output"],)),
            tokenizer,
            template="alpaca-short",
            max_length=512,
            loss_on="response",
        )
        for r in records
    ]
    return [example for example in encoded if example]


def synthetic(draws: torch.Generator) -> Encoded:
    """Log-normal lengths around 80 tokens, a fifth of them the response."""
    length = int(torch.empty(()).log_normal_(4.4, 0.5, generator=draws).clamp(16, 512))
    ids = torch.randint(1000, 100_000, (length,), generator=draws).tolist()
    return Encoded(ids, [False] * (length - length // 5) + [True] * (length // 5))


def wrapped(model: PreTrainedModel, lora: LoraConfig, run: Callable[[PeftModel], None]) -> None:
    """Run with stock PEFT layers in the base, and take them out again."""
    peft = get_peft_model(model, lora)
    run(peft.train())
    peft.unload()


def labelled(examples: list[Encoded], device: torch.device) -> dict[str, Tensor]:
    """What a plain transformers loop feeds: padded ids, mask and labels."""
    ids = [torch.tensor(example.input_ids) for example in examples]
    labels = [i.masked_fill(~torch.tensor(e.target), -100) for i, e in zip(ids, examples, strict=True)]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }
    return {name: value.to(device) for name, value in batch.items()}


def one_by_one(peft: PeftModel, starts: list[State], cohort: Cohort, lr: float, context: Autocast) -> None:
    """(a): a plain loop per client over stock PEFT, its adapter loaded and read."""
    parameters = {n: p for n, p in peft.named_parameters() if p.requires_grad}
    entries = {n: n.removeprefix("base_model.model.").removesuffix(".default.weight") for n in parameters}
    for start, batches in zip(starts, cohort, strict=True):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start[entries[name]])
        optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0)
        for batch in batches:
            with context():
                loss = peft(**labelled(batch, peft.device), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        State.of({entries[name]: parameter.detach().clone() for name, parameter in parameters.items()})


def floor(peft: PeftModel, cohort: Cohort, parts: int, lr: float, context: Autocast) -> None:
    """(b): steps of one adapter on everybody's examples, sorted by length into `parts` micro-batches."""
    parameters = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    for step in range(len(cohort[0])):
        everybody = sorted((e for client in cohort for e in client[step]), key=lambda e: len(e.input_ids))
        size = -(-len(everybody) // parts)
        for at in range(0, len(everybody), size):
            with context():
                loss = peft(**labelled(everybody[at : at + size], peft.device), use_cache=False).loss
            (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def lean_floor(peft: PeftModel, cohort: Cohort, args: argparse.Namespace, context: Autocast) -> None:
    """(b'): steps of one adapter on everybody's examples, with our plan of micro-batches and our loss."""
    optimizer = torch.optim.AdamW(
        [p for p in peft.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0
    )
    budget, overhead = budget_and_overhead(peft.device)
    for step in range(len(cohort[0])):
        everybody = [e for client in cohort for e in client[step]]
        for chosen in plan([len(e.input_ids) for e in everybody], args.budget or budget, overhead):
            with context():
                losses = token_losses(peft, collate([everybody[i] for i in chosen]))
            losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base", help="a folder with a model and its tokenizer; needs --data")
    source.add_argument("--shapes", choices=SHAPES, help="random weights and random examples")
    parser.add_argument("--data", help="a folder with one folder per client, each with train*.jsonl.gz")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 20], help="local steps")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=int, help="tokens per micro-batch (default: the project's own)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if bool(args.base) != bool(args.data):
        parser.error("--base and --data belong together")
    return args


if __name__ == "__main__":
    main()
