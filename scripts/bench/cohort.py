"""Times a fused cohort against stock PEFT: (a) its clients one after another, (b) a floor of one adapter.

(b) trains ONE adapter on the cohort's examples, sorted by length into 1, 2, 4 or 8 micro-batches; the best counts.
(a) and (b) are plain loops over transformers' own forward pass with labels.

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
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.fit import fit
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Work
from llm_fed.models.lora import Lora, draw
from llm_fed.state import State
from llm_fed.tasks.common import Encoded, Example
from llm_fed.tasks.templates import encoded

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1000},
}
Cohort = list[list[list[Encoded]]]  # by client and step


class Bench:
    """The variants to time, on one base and one set of examples."""

    def __init__(self, args: argparse.Namespace, model: PreTrainedModel | None = None):
        self.args, dtype = args, getattr(torch, args.dtype)
        self.autocast = None if dtype == torch.float32 else dtype
        self.model: PreTrainedModel
        if model is not None:  # of the same shapes, from an earlier cohort
            self.model = model
        elif args.base:
            self.model = AutoModelForCausalLM.from_pretrained(args.base, dtype=dtype)
        else:
            with torch.device(args.device):
                self.model = LlamaForCausalLM(LlamaConfig(**SHAPES[args.shapes])).to(dtype)
        self.model.to(args.device)
        self.structure = Lora(rank=8, alpha=16, dropout=args.dropout, target_modules=("q_proj", "v_proj"))
        self.starts = [draw(self.model, self.structure, generator(0, k)) for k in range(args.clients)]
        self.examples = examples(args, self.model.config.vocab_size)

    def cohort(self, steps: int) -> Cohort:
        return [client[:steps] for client in self.examples]

    def jobs(self, steps: int) -> list[Fit]:
        found = []
        for k, (start, batches) in enumerate(zip(self.starts, self.cohort(steps), strict=True)):
            indices, chosen = iter(range(sum(map(len, batches)))), [example for batch in batches for example in batch]
            of_steps = [[next(indices) for _ in batch] for batch in batches]
            found.append(Fit(f"{k}", self.structure, start, chosen, of_steps, Optimizer(self.args.lr)))
        return found

    def ours(self, steps: int) -> Work:
        results, work = fit(self.adapted(self.structure), self.jobs(steps))
        if failed := [result for result in results if isinstance(result, ClientError)]:
            raise failed[0]
        return work

    def adapted(self, structure: Lora) -> AdaptedModel:
        return AdaptedModel(self.model, structure, autocast=self.autocast, budget=self.args.budget)

    def one_by_one(self, steps: int) -> None:
        """(a): each client's adapter is loaded, trained and read."""
        peft = self.wrapped()
        parameters = {name: p for name, p in peft.named_parameters() if p.requires_grad}
        for start, batches in zip(self.starts, self.cohort(steps), strict=True):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    entry = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                    parameter.copy_(start[entry])
            optimizer = self.optimizer(peft)
            for batch in batches:
                self.stock_loss(peft, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            State.of({name: parameter.detach().cpu() for name, parameter in parameters.items()})
        peft.unload()

    def floor(self, steps: int, parts: int) -> None:
        """(b): everybody's examples, sorted by length and cut into `parts` micro-batches."""
        peft = self.wrapped()
        optimizer = self.optimizer(peft)
        for batches in zip(*self.cohort(steps), strict=True):
            everybody = sorted((e for batch in batches for e in batch), key=lambda e: len(e.input_ids))
            size = -(-len(everybody) // parts)
            for at in range(0, len(everybody), size):
                self.stock_loss(peft, everybody[at : at + size]).backward()
            optimizer.step()
            optimizer.zero_grad()
        peft.unload()

    def wrapped(self) -> PeftModel:
        """Stock PEFT layers in the base, until `unload`."""
        names = list(self.structure.target_modules)
        config = LoraConfig(r=8, lora_alpha=16, lora_dropout=self.args.dropout, target_modules=names)
        return get_peft_model(self.model, config).train()

    def optimizer(self, peft: PeftModel) -> torch.optim.Optimizer:
        trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.args.lr, weight_decay=0.0)

    def context(self) -> AbstractContextManager[None]:
        return torch.autocast(self.args.device, self.autocast, enabled=self.autocast is not None)

    def stock_loss(self, peft: PeftModel, batch: list[Encoded]) -> Tensor:
        """Transformers' own loss of a padded batch with mask and labels."""
        ids = [torch.tensor(example.input_ids) for example in batch]
        labels = [i.masked_fill(~torch.tensor(e.target), -100) for i, e in zip(ids, batch, strict=True)]
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }
        with self.context():
            return peft(**{n: t.to(peft.device) for n, t in inputs.items()}, use_cache=False).loss


def examples(args: argparse.Namespace, vocabulary: int) -> Cohort:
    """The first batches of each client; random tokens of Flan-like lengths where there is no data."""
    count = max(args.steps) * args.batch_size
    if args.data:
        tokenizer = AutoTokenizer.from_pretrained(args.base)
        folders = sorted(path for path in Path(args.data).iterdir() if path.is_dir())[: args.clients]
        clients = [flan(folder, tokenizer)[:count] for folder in folders]
    else:
        draws = generator(0, "examples")
        clients = [[synthetic(draws, vocabulary, args.log_length) for _ in range(count)] for _ in range(args.clients)]
    return [[c[at : at + args.batch_size] for at in range(0, count, args.batch_size)] for c in clients]


def flan(folder: Path, tokenizer) -> list[Encoded]:
    with gzip.open(next(folder.glob("train*.gz")), "rt") as lines:
        records = [json.loads(line) for line in lines]
    examples = [
        encoded(Example(record["instruction"], (record["output"],)), tokenizer, "alpaca-short") for record in records
    ]
    return [example for example in examples if len(example.input_ids) <= 512]


def synthetic(draws: torch.Generator, vocabulary: int, log_length: float = 4.4) -> Encoded:
    """Log-normal lengths around exp(log_length), by default some 80 tokens, a fifth of them the response."""
    length = int(torch.empty(()).log_normal_(log_length, 0.5, generator=draws).clamp(16, 512))
    ids = torch.randint(vocabulary, (length,), generator=draws).tolist()
    return Encoded(ids, [False] * (length - length // 5) + [True] * (length // 5))


def timed(run: Callable[[int], object], steps: int, clock: Callable[[], float]) -> float:
    begin = clock()
    run(steps)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - begin


def measure(bench: Bench, steps: int, repeats: int) -> str:
    """A row of the table. Variants run in turn; of the floors, after the first turn, only the two fastest."""
    floors: dict[str, Callable[[int], object]] = {
        f"{parts}": partial(bench.floor, parts=parts) for parts in (1, 2, 4, 8)
    }
    runs: dict[str, Callable[[int], object]] = {
        "ours": bench.ours,
        "a": bench.one_by_one,
        **floors,
    }
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[bench.args.clock]
    padding = bench.ours(steps).padding  # and a warm-up
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        if repeat == 1:
            for slow in sorted(floors, key=lambda name: seconds[name][0])[2:]:
                del floors[slow], runs[slow]
        for name, run in runs.items():
            seconds[name].append(timed(run, steps, clock))
    median = {name: statistics.median(seconds[name]) for name in runs}
    best = min(floors, key=lambda name: median[name])
    ours, a, b = median["ours"], median["a"], median[best]
    return f"| {steps} | {ours:.2f} | {padding:.1%} | {a:.2f} | {b:.2f} ({best}) | {ours / a:.2f} | {ours / b:.2f} |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base", help="a folder with a model and its tokenizer; needs --data")
    source.add_argument("--shapes", choices=SHAPES, help="use random weights and examples of these shapes")
    parser.add_argument("--data", help="a folder with one folder per client, each with train*.jsonl.gz")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 20], help="local steps")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--log-length", type=float, default=4.4, help="mean logarithm of the examples' lengths")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=int, help="tokens per micro-batch (default: as in a run)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="use cpu on a busy machine")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if bool(args.base) != bool(args.data):
        parser.error("--base and --data belong together")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    bench = Bench(args)
    print(f"{args.clients} clients, batch {args.batch_size}, {args.dtype}, {args.device}, {args.threads} threads, ")
    print(f"torch {torch.__version__}; {args.clock} seconds, median of {args.repeats} alternating runs\n")
    print("| steps | ours | padding | (a) | (b) (micro-batches) | ours/(a) | ours/(b) |")
    print("|---|---|---|---|---|---|---|")
    for steps in args.steps:
        print(measure(bench, steps, args.repeats), flush=True)


if __name__ == "__main__":
    main()
