"""Times clients that train a classifier of texts together against the same clients one after another.

    python scripts/bench/classifiers.py --base FOLDER --data FILE [--clients 8] [--steps 4] [--batch 8] [--repeats 3]

FILE has rows with a text and a label, which are dealt out. The two ways take turns; of each the best time counts. Both
use the engine of llm_fed, so the ratio is what sharing passes over the base is worth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from alternating import best

from llm_fed.basics.rng import generator
from llm_fed.engine.engine import Engine
from llm_fed.kinds.sequences import Sequences, load_sequences
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.settings.config import AdapterConfig, BaseConfig, Config, PartitionConfig, TaskConfig
from llm_fed.tasks import labelled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--data", type=Path, required=True)
    for name, usual in (("clients", 8), ("steps", 4), ("batch", 8), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    partition = PartitionConfig("iid", clients=given.clients)
    task = labelled.load(TaskConfig("classification", str(given.data), partition=partition), 0)
    base = load_sequences(Config(base=BaseConfig(name=given.base, dtype="float32")), task, "cpu")
    jobs = fits(base, task.clients["all"].train, given.clients, given.steps, given.batch)
    ways: dict[str, Callable[[], object]] = {
        "together": lambda: Engine(base).execute(jobs),
        "one by one": lambda: [Engine(base).execute([job]) for job in jobs],
    }
    least = best(ways, given.repeats, time.perf_counter)
    lengths = [len(example.input_ids) for job in jobs for example in job.examples]
    length = sum(lengths) / len(lengths)
    print(f"{len(jobs)} clients, {given.steps} steps of {given.batch} texts of {length:.1f} tokens, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in least.items()))
    print(f"ratio {least['together'] / least['one by one']:.2f}")


def fits(base: Sequences, rows: Sequence[object], clients: int, steps: int, batch: int) -> list[Fit]:
    """The training of each client on rows of its own."""
    structure, found = base.structure(AdapterConfig()), []
    for client in range(clients):
        examples = base.encode(list(rows)[client::clients])
        batches = [[examples[(step * batch + n) % len(examples)] for n in range(batch)] for step in range(steps)]
        start = base.draw(structure, generator(0, "initial"))
        found.append(Fit.on(f"client {client}", structure, start, batches, Optimizer(1e-3), seed=client))
    return found


if __name__ == "__main__":
    main()
