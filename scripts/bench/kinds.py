"""Times what clients train: eight together against the same one by one, and a step of DPO against one of SFT.
The floor is one adapter on the texts of all clients: what fusing would cost if it cost nothing.

    OMP_NUM_THREADS=1 python scripts/bench/kinds.py --base FOLDER --encoder FOLDER [--texts 8] [--kinds sft ...]

Texts are random tokens, 24 on average. SFT, DPO and DoRA train on the same texts, of which DPO compares half
with the other half; its time has the log-likelihoods under the base in it, once for each text. Clients ask for these
one by one, as in a run, but for the floor. All ways take turns, and the least CPU time of each counts, so that other
programs hardly matter. What bounds the ratio stands at the end: the share of products in the first kind's time, and how
fast a layer's largest product is on one client's tokens and on those of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from alternating import best
from transformers import AutoConfig

from llm_fed.basics.rng import generator
from llm_fed.engine.engine import Engine
from llm_fed.engine.preferences import examples_of
from llm_fed.kinds.language import load_base
from llm_fed.kinds.sentences import Sentence
from llm_fed.kinds.sequences import load_sequences
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, LogLikelihoods
from llm_fed.settings.config import AdapterConfig, BaseConfig, Config
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.tasks.common import AnswerPair, ClientData, Encoded, TaskData

LENGTHS = (16, 32)  # tokens of a text
KINDS = ("sft", "dpo", "dora", "classification")
EXPERTS = "experts"  # SFT with adapters on the experts of a base that is a mixture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--encoder", help="for classification")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, EXPERTS], default=KINDS)
    for name, usual in (("clients", 8), ("texts", 8), ("steps", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    ways: dict[tuple[str, str], Callable[[], Any]] = {}
    for kind in given.kinds:
        base, jobs = made(kind, given)
        ways[kind, "together"] = partial(work, base, jobs)
        ways[kind, "one by one"] = partial(one_by_one, base, jobs)
        ways[kind, "floor"] = partial(work, base, [joined(jobs)])
    least = best(ways, given.repeats, time.process_time)
    print(f"{given.clients} clients, {given.steps} steps of {given.texts} texts, {torch.get_num_threads()} threads")
    for kind in given.kinds:
        together, apart, floor = (least[kind, way] for way in ("together", "one by one", "floor"))
        print(
            f"{kind}: together {together:.2f} s, one by one {apart:.2f} s, ratio {together / apart:.2f}; "
            f"floor {floor:.2f} s, ratio {floor / apart:.2f}"
        )
    if {"sft", "dpo"} <= {*given.kinds}:
        for way in ("together", "one by one"):
            print(f"dpo / sft, {way}: {least['dpo', way] / least['sft', way]:.2f}")
    first = given.kinds[0]
    print(f"{first}, one by one: {100 * share_of_products(ways[first, 'one by one']):.0f} % of the time are products")
    for clients in (1, given.clients):
        tokens = clients * given.texts * sum(LENGTHS) // 2
        print(f"a layer's product on {tokens} tokens: {speed(given.base, tokens):.0f} Gflop/s")


def share_of_products(work: Callable[[], Any]) -> float:
    """Of the time that PyTorch's operations take."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    return sum(times.get(f"aten::{name}", 0) for name in ("mm", "addmm", "bmm", "baddbmm")) / sum(times.values())


def speed(base: str, tokens: int) -> float:
    """Of the first product of a block's MLP, in 10^9 operations a second: the best of five."""
    config = AutoConfig.from_pretrained(base)
    inputs, weight = torch.randn(tokens, config.hidden_size), torch.randn(config.intermediate_size, config.hidden_size)
    operations, least = 2 * tokens * weight.numel(), float("inf")
    often = max(3, 4 * 10**9 // operations)
    for _ in range(5):
        began = time.process_time()
        for _ in range(often):
            torch.nn.functional.linear(inputs, weight)
        least = min(least, (time.process_time() - began) / often)
    return operations / least / 1e9


def work(base: Any, jobs: list[Fit]) -> None:
    """The jobs, after what the base makes of preferences."""
    if isinstance(jobs[0].examples[0], AnswerPair):
        jobs = [compared(base, job) for job in jobs]
    for result in Engine(base).execute(jobs):
        if isinstance(result, Exception):
            raise result


def one_by_one(base: Any, jobs: list[Fit]) -> None:
    for job in jobs:
        work(base, [job])


def joined(jobs: list[Fit]) -> Fit:
    """One client with the texts of all."""
    first = jobs[0]
    batches = [[example for job in jobs for example in job.batch(step)] for step in range(len(first.batches))]
    return Fit.on("all", first.structure, first.start, batches, first.optimizer)


def compared(base: Any, job: Fit) -> Fit:
    """A job with the log-likelihoods of its pairs under the base."""
    (known,) = Engine(base).execute([LogLikelihoods(job.site, job.structure, None, job.examples)])
    if isinstance(known, Exception):
        raise known
    pairs: Any = zip(job.examples, known, strict=True)
    return replace(job, examples=[replace(pair, reference=own) for pair, own in pairs])


def made(kind: str, given: argparse.Namespace) -> tuple[Any, list[Fit]]:
    """The base, and the training of each client."""
    fused = ("experts.gate_up_proj", "experts.down_proj") if kind == EXPERTS else ()
    adapter = AdapterConfig(dropout=0.0, dora=kind == "dora", target_parameters=fused)
    if kind == "classification":
        clients = {"all": ClientData([], [], [])}
        task = TaskData("classification", "accuracy", clients, ("no", "yes"), kind="sequence-classification")
        base: Any = load_sequences(Config(base=BaseConfig(given.encoder, dtype="float32")), task, "cpu")
    else:
        base = load_base(BaseConfig(given.base, dtype="float32"), "cpu")
        base = replace(base, trains=examples_of(ObjectiveConfig("dpo"))) if kind == "dpo" else base
    structure, jobs = base.structure(adapter), []
    for client in range(given.clients):
        draws = torch.Generator().manual_seed(client)
        batches = [examples(kind, draws, given.texts) for _ in range(given.steps)]
        start = base.draw(structure, generator(0, "initial"))
        jobs.append(Fit.on(f"client {client}", structure, start, batches, Optimizer(1e-4), seed=client))
    return base, jobs


def examples(kind: str, draws: torch.Generator, count: int) -> list[Any]:
    """Those of one step."""
    ids = [
        torch.randint(100, 20_000, (int(torch.randint(*LENGTHS, (), generator=draws)),), generator=draws).tolist()
        for _ in range(count)
    ]
    if kind == "classification":
        return [Sentence(each, [0] * len(each), place % 2) for place, each in enumerate(ids)]
    texts = [Encoded(each, [place >= len(each) // 2 for place in range(len(each))]) for each in ids]
    if kind != "dpo":
        return texts
    return [AnswerPair(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]


if __name__ == "__main__":
    main()
