"""What a finished run spent outside local training and evaluation, per round, from its timing.jsonl.

python scripts/bench/overhead.py RUN_DIR [RUN_DIR ...]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from llm_fed.runs.records import timed_rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    given = parser.parse_args()
    print("| run | rounds | local training, s per round | everything else, ms per round | share of the round |")
    print("|---|---|---|---|---|")
    for folder in given.runs:
        rounds = timed_rounds(folder)
        local = [line["parts"]["local"] for line in rounds]
        whole = [line["seconds"] - line["parts"].get("evaluate", 0.0) for line in rounds]
        rest = [total - mine for total, mine in zip(whole, local, strict=True)]
        print(
            f"| {folder.name} | {len(rounds)} | {statistics.fmean(local):.2f} | {1000 * statistics.fmean(rest):.1f} | "
            f"{sum(rest) / sum(whole):.2%} |"
        )


if __name__ == "__main__":
    main()
