"""What the runs of a comparison spend on their data, beside training: reading, measuring and encoding it, for each run
as separate commands do, or shared as `llm-fed compare` does. In CPU seconds, as others may use the same cores, and with
the memory that the process holds after each run beside the base.

    python scripts/bench/comparison.py --base FOLDER --data FOLDER [--template chat] [--methods 2] [--draws 2] [--alone]

The data are those of the task `flan`, see docs/tasks.md. All examples are encoded, as training and scoring do it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from psutil import Process
from rich.console import Console

from llm_fed.bench.bases import Bases
from llm_fed.bench.build import prepare
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile

METHODS = ("fedit", "local", "fedmerge", "ifca", "fedalt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="folder of a language model")
    parser.add_argument("--data", required=True, help="folder of the task's files")
    parser.add_argument("--template", default="chat")
    parser.add_argument("--methods", type=int, default=2, help=f"how many of {', '.join(METHODS)}")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="share nothing")
    args = parser.parse_args()
    tree: dict[str, Any] = {
        "device": "cpu",
        "base": {"name": args.base, "dtype": "float32"},
        "task": {"name": "flan", "path": args.data, "template": args.template, "validation": 0.1},
    }
    configs = [
        configfile.load({**tree, "seed": seed, "method": {"name": name}})
        for seed in range(args.draws)
        for name in METHODS[: args.methods]
    ]
    bases, reporter = Bases(reuse=not args.alone), Reporter(Console(quiet=True))
    bases.of(configs[0])
    process, seconds, held = Process(), list[float](), list[int]()
    before = process.memory_info().rss
    for config in configs:
        began = time.process_time()
        built = prepare(config, reporter, base=bases.of(config))
        for site in built.clients.values():
            for part in (site.data.train, site.data.held_out, *site.data.queries.values()):
                part[:]
        seconds.append(time.process_time() - began)
        held.append((process.memory_info().rss - before) // 2**20)
    print(f"{len(configs)} runs: {sum(seconds):.1f} CPU seconds, of each {', '.join(f'{s:.2f}' for s in seconds)}")
    print(f"MiB after each: {', '.join(map(str, held))}")


if __name__ == "__main__":
    main()
