"""Times answers of all clients, each under its own adapter, beside stock PEFT client by client: greedy generation, and
option scoring (the log-likelihood of each option of a prompt).

Ours is the way of every evaluation: one batch holds rows of any clients. The other loads one client's adapter after
another into a PEFT model, and calls transformers' `generate`, or its forward pass on every prompt with each of its
options behind it; its rows are sorted by length, too. Both must say the same. The adapters are random and differ.

    python scripts/bench/generation.py --base BASE --data FLAN
    python scripts/bench/generation.py --base BASE --task commonsense --data COMMONSENSE --new-tokens 32

In ours the next prompts take the place of answers that have ended; `--no-stock` leaves stock PEFT out. The last line
says how much of the prompts is a repetition of what a client's prompts begin with. Without --base and --data: the tiny
base that llm_fed ships, on the quickstart's planted clients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from peer_loops import adapted, entry_of_peft
from peft import set_peft_model_state_dict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llm_fed.basics.rng import generator
from llm_fed.engine.generation import most_rows
from llm_fed.models.prompt import stop_tokens

STOCK = "stock PEFT, client by client"

Row = tuple[int, list[int]]  # how long the prompt is, and the tokens of it and of what follows it
Said = dict[str, list[Any]]  # by client: its texts, or of each query the log-likelihoods of its options


class Bench:
    """Both ways, on the first `limit` test examples of each client."""

    def __init__(self, words: Sequence[str], limit: int):
        built = peers.built(words)
        config, self.sites, self.run = built.config, built.clients, built.runtime.run
        base: Any = built.base
        self.tokenizer, self.stops = base.tokenizer, stop_tokens(base)
        self.size, self.new_tokens = most_rows(config.eval.batch_size, base.device), config.eval.max_new_tokens
        self.queries = {id: list(site.data.queries["test"][:limit]) for id, site in self.sites.items()}
        with_options = {id: [query for query in queries if query.options] for id, queries in self.queries.items()}
        self.options = {id: queries for id, queries in with_options.items() if queries}
        start = built.server.initial()
        noise = {id: torch.randn(start.row.shape, generator=generator(0, id)) for id in self.sites}
        self.states = {id: start.like(start.row + 0.02 * each) for id, each in noise.items()}
        self.stock: Any = adapted(config.base.name, config.adapter).eval()

    def texts(self) -> Said:
        asked = {id: [query.prompt for query in queries] for id, queries in self.queries.items()}
        return self.run({id: self.sites[id].generate(self.states[id], prompts) for id, prompts in asked.items()})

    def scores(self) -> Said:
        return self.run(
            {id: self.sites[id].option_scores(self.states[id], queries) for id, queries in self.options.items()}
        )

    def stock_texts(self) -> Said:
        rows = {
            id: [(len(query.prompt), query.prompt) for query in rows_of_client]
            for id, rows_of_client in self.queries.items()
        }
        return {id: self._answers(id, self._generated, rows_of_client) for id, rows_of_client in rows.items()}

    def stock_scores(self) -> Said:
        scores_by_client = {}
        for id, queries in self.options.items():
            rows = [(len(query.prompt), [*query.prompt, *option]) for query in queries for option in query.options]
            scores = iter(self._answers(id, self._scored, rows))
            scores_by_client[id] = [[next(scores) for _ in query.options] for query in queries]
        return scores_by_client

    @torch.inference_mode()
    def _answers(self, id: str, answer: Callable[[list[Row]], list[Any]], rows: list[Row]) -> list[Any]:
        """Under a client's adapter: longest first, given back in the order of the rows."""
        state, answers = self.states[id], dict[int, Any]()
        set_peft_model_state_dict(self.stock, {entry_of_peft(name): state[name].clone() for name in state})
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][1]))
        for chosen in (order[at : at + self.size] for at in range(0, len(order), self.size)):
            answers.update(zip(chosen, answer([rows[i] for i in chosen]), strict=True))
        return [answers[i] for i in range(len(rows))]

    def _generated(self, rows: list[Row]) -> list[str]:
        ids, mask = padded(rows, "left")
        ends = {"eos_token_id": sorted(self.stops), "pad_token_id": min(self.stops), "max_new_tokens": self.new_tokens}
        out = self.stock.generate(input_ids=ids, attention_mask=mask, do_sample=False, use_cache=True, **ends)
        new = [list(takewhile(lambda token: token not in self.stops, row)) for row in out[:, ids.shape[1] :].tolist()]
        return [str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in new]

    def _scored(self, rows: list[Row]) -> list[float]:
        ids, mask = padded(rows, "right")
        logs = self.stock(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        picked = logs.gather(-1, ids[:, 1:, None])[..., 0]
        return [float(picked[n, start - 1 : len(row) - 1].sum()) for n, (start, row) in enumerate(rows)]


def padded(rows: Sequence[Row], side: str) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (N, T) each."""
    ids = [torch.tensor(row) for _, row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side=side)
    return pad_sequence(ids, batch_first=True, padding_side=side), mask


def repeated(prompts: Sequence[Sequence[Sequence[int]]]) -> float:
    """The share of all prompts' tokens that need not be computed again if a client's common prefix is kept."""
    shared = [
        sum(1 for _ in takewhile(lambda at: len(set(at)) == 1, zip(*of_client, strict=False))) for of_client in prompts
    ]
    saved = sum(length * (len(of_client) - 1) for length, of_client in zip(shared, prompts, strict=True))
    return saved / sum(len(prompt) for of_client in prompts for prompt in of_client)


def timed(what: str, ways: Mapping[str, Callable[[], Said]], repeats: int) -> None:
    """Prints the table of all ways, the most memory of each, or ends where they say different things."""
    first, *others = ways
    said, peaks = {}, {}
    for name, way in ways.items():
        said[name], peaks[name] = peak_of(way)
    for other in others:
        for id, answers in said[first].items():
            for number, (one, two) in enumerate(zip(answers, said[other][id], strict=True)):
                if not (one == two if isinstance(one, str) else np.allclose(one, two, atol=1e-3)):
                    raise SystemExit(f"generation.py: client {id}, prompt {number}: {first} {one!r}, {other} {two!r}")
    memory = ", ".join(f"{name} {peak / 2**20:,.0f} MiB" for name, peak in peaks.items())
    print(f"\n{what}; all ways say the same. Most memory, beside what was there: {memory}\n", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in (each for _ in range(repeats) for each in ways.items()):  # in turn
        began = time.process_time()
        way()
        seconds[name].append(time.process_time() - began)
    reference = statistics.median(seconds[first])
    print(f"| variant | seconds | {first} = 1 |\n|---|---|---|")
    for name, its in seconds.items():
        median = statistics.median(its)
        print(f"| {name} | {median:.3f} ({min(its):.3f}-{max(its):.3f}) | {median / reference:.2f} |")


def peak_of(way: Callable[[], Said]) -> tuple[Said, int]:
    """What it says, and the bytes that the process grew by meanwhile (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    before = status("VmRSS")
    said = way()
    return said, status("VmHWM") - before


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=peers.TINY_BASE, help="a folder with a model and its tokenizer")
    parser.add_argument("--data", help="folder with the data of the task")
    parser.add_argument("--task", default="flan", help="flan, commonsense or rolebench; not without --data")
    parser.add_argument("--template", default="plain", help="of the prompts, e.g. alpaca")
    parser.add_argument("--limit", type=int, default=50, help="prompts per client")
    parser.add_argument("--new-tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a forward pass")
    parser.add_argument("--no-stock", action="store_true", help="only ours, and only texts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    words = [
        f"base.name={args.base}", "base.dtype=float32", "device=cpu", "method=fedit", "task.max_length=512",
        f"task.template={args.template}",
        f"eval.batch_size={args.batch_size}", f"eval.max_new_tokens={args.new_tokens}",
        *([f"task.name={args.task}", f"task.path={args.data}"] if args.data else ["task.name=planted"]),
    ]  # fmt: skip
    bench = Bench(words, args.limit)
    asked = [[query.prompt for query in queries] for queries in bench.queries.values()]
    scored = [query for queries in bench.options.values() for query in queries]
    print(f"{len(asked)} clients, {args.threads} threads, batches of {args.batch_size}; CPU seconds")
    said = f"{sum(map(len, asked))} answers of at most {args.new_tokens} tokens"
    ways = {"ours": bench.texts}
    timed(said, ways | ({} if args.no_stock else {STOCK: bench.stock_texts}), args.repeats)
    said = f"{sum(len(query.options) for query in scored)} options of {len(scored)} prompts"
    if scored and not args.no_stock:
        timed(said, {"ours": bench.scores, STOCK: bench.stock_scores}, args.repeats)
    print(f"\nWhat a client's prompts begin with: {repeated(asked):.1%} of their tokens are a repetition")


if __name__ == "__main__":
    main()
