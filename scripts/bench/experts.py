"""Times methods with several experts: the fused cohort against the same clients one after another, and against FedIT.

Stock PEFT has no routers, so one by one is this project's own code with one client per pass.

    python scripts/bench/experts.py --base FOLDER --data FOLDER_OF_CLIENTS --clock cpu
    python scripts/bench/experts.py --shapes llama-3.2-3b --device cuda --dtype bfloat16
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from cohort import Bench, parse, timed

from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import generator
from llm_fed.engine.fit import fit
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.models.lora import Lora, draw


def structures(plain: Lora) -> dict[str, tuple[Lora, tuple[float, ...] | None]]:
    """What the methods train, and the mix of those that have a fixed one."""
    return {
        "fedit": (plain, None),
        "feddpa (2, fixed mix)": (plain.with_experts("global", "local", gate="mix"), (0.5, 0.5)),
        "pfedmoe, fedalt (2, router)": (plain.with_experts("global", "local", gate="router"), None),
        "fedem d=4 (4, router)": (plain.with_experts(*"abcd", gate="router"), None),
        "fedem d=8 (8, router)": (plain.with_experts(*"abcdefgh", gate="router"), None),
    }


def run(bench: Bench, structure: Lora, mix: tuple[float, ...] | None, steps: int, *, fused: bool) -> None:
    batches = bench.cohort(steps)
    start = draw(bench.model, structure, generator(0, "start"))
    jobs = [
        Fit.on(f"{k}", structure, start, own_batches, Optimizer(bench.args.lr), mix=mix)
        for k, own_batches in enumerate(batches)
    ]
    for part in [jobs] if fused else [[job] for job in jobs]:
        results, _ = fit(bench.adapted(structure), part)
        if failed := [result for result in results if isinstance(result, ClientError)]:
            raise failed[0]


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    bench, clock = Bench(args), {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    steps = args.steps[0]
    seconds: dict[str, list[tuple[float, float]]] = {}
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for name, (structure, mix) in structures(bench.structure).items():
            pair = [timed(partial(run, bench, structure, mix, fused=fused), steps, clock) for fused in (True, False)]
            if repeat:
                seconds.setdefault(name, []).append((pair[0], pair[1]))
    print(f"{args.clients} clients, {steps} steps, batch {args.batch_size}, {args.dtype}, {args.device}, ")
    print(f"{args.threads} threads, torch {torch.__version__}; {args.clock} seconds, median of {args.repeats}\n")
    print("| method (experts, gate) | fused | one by one | fused / one by one | fused / fedit fused |")
    print("|---|---|---|---|---|")
    medians = {name: [statistics.median(side) for side in zip(*times, strict=True)] for name, times in seconds.items()}
    for name, (fused, alone) in medians.items():
        print(f"| {name} | {fused:.2f} | {alone:.2f} | {fused / alone:.2f} | {fused / medians['fedit'][0]:.2f} |")


if __name__ == "__main__":
    main()
