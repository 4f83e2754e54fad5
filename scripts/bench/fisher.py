"""Times POTARA's mixing weights of a cohort against (a) a loop of per-example backward passes and (b) training steps.

(a) is stock PEFT: for each client and each of its two adapters one forward and one backward pass per example, then the
same arithmetic; (b) is one local training step of stock PEFT for each client. The three take turns.

    python scripts/bench/fisher.py --base FOLDER --data FOLDER_OF_CLIENTS
    python scripts/bench/fisher.py --shapes llama-3.2-3b --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from cohort import SHAPES, flan, synthetic
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import llm_fed
from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import generator
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.gradients import evidence
from llm_fed.merge.moments import Moments
from llm_fed.mergers.potara import traces
from llm_fed.method.requests import GradientMoments
from llm_fed.models.lora import Lora, draw
from llm_fed.state import State
from llm_fed.tasks.common import Encoded

QWEN3_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MODELS = {"llama-3.2-3b": ("llama", SHAPES["llama-3.2-3b"]), "qwen3-4b": ("qwen3", QWEN3_4B)}
TINY_BASE = Path(llm_fed.__file__).parent / "assets" / "tiny-base"
NAMES = ["q_proj", "k_proj", "v_proj"]
DAMPING = 1e-3


class Bench:
    """The variants to time, on one base, with the same adapters and examples."""

    def __init__(self, args: argparse.Namespace):
        self.args, dtype = args, getattr(torch, args.dtype)
        self.autocast = None if dtype == torch.float32 else dtype
        if args.shapes:
            kind, shape = MODELS[args.shapes]
            with torch.device(args.device):
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(args.base, dtype=dtype)
        self.model: PreTrainedModel = model.to(args.device).eval()
        self.structure = Lora(rank=8, alpha=16, dropout=0.0, target_modules=tuple(NAMES))
        self.jobs = [
            GradientMoments(f"{k}", self.structure, self.adapter(k, "fed"), self.adapter(k, "local"), examples)
            for k, examples in enumerate(self.examples())
        ]

    def adapter(self, k: int, name: str) -> State:
        """As after some training: B is not zero."""
        state, draws = draw(self.model, self.structure, generator(0)), generator(0, name, k)
        return state.like(state.row + 0.01 * torch.randn(state.row.shape, generator=draws))

    def examples(self) -> list[list[Encoded]]:
        args = self.args
        if args.data:
            tokenizer = AutoTokenizer.from_pretrained(args.base)
            folders = sorted(path for path in Path(args.data).iterdir() if path.is_dir())[: args.clients]
            return [flan(folder, tokenizer)[: args.samples] for folder in folders]
        draws, size = generator(0, "examples"), self.model.config.vocab_size
        return [[synthetic(draws, size) for _ in range(args.samples)] for _ in range(args.clients)]

    def ours(self) -> list[float]:
        model = AdaptedModel(self.model, self.structure, autocast=self.autocast, budget=self.args.budget)
        moments = evidence(model, self.jobs)
        weights = []
        for of in moments:
            if isinstance(of, ClientError):
                raise of
            weights.append(traces(of.moments, of.fisher, DAMPING).weight)
        return weights

    def loop(self) -> list[float]:
        """(a)"""
        peft, weights = self.wrapped(), []
        parameters = {name: p for name, p in peft.named_parameters() if p.requires_grad}
        for job in self.jobs:
            gradients = []
            for state in (job.first, job.second):
                self.load(parameters, state)
                for example in job.examples:
                    (self.loss(peft, [example]) * sum(example.target[1:])).backward()
                    gradients.append(torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None]))
                    peft.zero_grad()
            moments = Moments.of(torch.stack(gradients).view(2, len(job.examples), -1))
            weights.append(traces(moments, moments.fisher, DAMPING).weight)
        peft.unload()
        return weights

    def steps(self) -> None:
        """(b)"""
        peft = self.wrapped()
        parameters = {name: p for name, p in peft.named_parameters() if p.requires_grad}
        for job in self.jobs:
            self.load(parameters, job.first)
            optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4, weight_decay=0.0)
            self.loss(peft, list(job.examples[: self.args.batch_size])).backward()
            optimizer.step()
            optimizer.zero_grad()
        peft.unload()

    def wrapped(self) -> PeftModel:
        config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=NAMES)
        return get_peft_model(self.model, config)

    def load(self, parameters: dict[str, torch.nn.Parameter], state: State) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                entry = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                parameter.copy_(state[entry])

    def context(self) -> AbstractContextManager[None]:
        return torch.autocast(self.args.device, self.autocast, enabled=self.autocast is not None)

    def loss(self, peft: PeftModel, batch: list[Any]) -> torch.Tensor:
        """Transformers' own loss of a padded batch; a single example needs no mask."""
        ids = [torch.tensor(example.input_ids) for example in batch]
        labels = [i.masked_fill(~torch.tensor(e.target), -100) for i, e in zip(ids, batch, strict=True)]
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }
        if len(batch) > 1:
            inputs["attention_mask"] = pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
        with self.context():
            return peft(**{n: t.to(peft.device) for n, t in inputs.items()}, use_cache=False).loss


def timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    begin = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - begin


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=str(TINY_BASE), help="a folder with a model and its tokenizer")
    parser.add_argument("--shapes", choices=MODELS, help="instead of --base: random weights of these shapes")
    parser.add_argument("--data", help="a folder with one folder per client, each with train*.jsonl.gz")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4, help="examples per training step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=int, help="tokens per backward pass (default: as in a run)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="use cpu on a busy machine")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.data and args.shapes:
        parser.error("--data goes with --base")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    bench = Bench(args)
    ours, looped = bench.ours(), bench.loop()  # also the warm-up
    apart = max(abs(one - other) for one, other in zip(ours, looped, strict=True))
    bench.steps()
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    runs = {"ours": bench.ours, "a": bench.loop, "b": bench.steps}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            seconds[name].append(timed(run, clock))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    tokens = sum(len(example.input_ids) for job in bench.jobs for example in job.examples)
    print(f"{args.shapes or args.base}, {args.dtype}, {args.device}, {args.threads} threads, torch {torch.__version__}")
    print(f"{args.clients} clients with {args.samples} examples each, {tokens} tokens in all; {args.clock} seconds, ")
    print(f"median of {args.repeats} alternating runs")
    print(f"largest difference of a weight from the loop's: {apart:.1e}\n")
    print("| ours, s | (a), s | (b), s | ours / (a) | ours / (b) |\n|---|---|---|---|---|")
    print(
        f"| {median['ours']:.3f} | {median['a']:.3f} | {median['b']:.3f} "
        f"| {median['ours'] / median['a']:.3f} | {median['ours'] / median['b']:.2f} |"
    )


if __name__ == "__main__":
    main()
