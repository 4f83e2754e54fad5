"""Seconds and memory of `llm-fed init` on data of three sizes: 1 GB in one file, 100,000 rows in one file, 1,000 files.

python scripts/bench/init.py --out FOLDER [--data large rows files] [--repeats 1]

The data are made in FOLDER where they are not there yet. Each `init` is a process of its own, with the tiny base that
comes with llm_fed; seconds are those of one core (user and system) and of the clock, memory is the peak of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import llm_fed

BASE = Path(llm_fed.__file__).parent / "assets" / "tiny-base"
GB = 10**9
WORDS = [
    "the", "clerk", "of", "a", "depot", "looks", "up", "which", "bay", "holds", "crate", "and", "says", "so", "before",
    "lorry", "leaves", "gate", "at", "noon",
]  # fmt: skip


def row(number: int, letters: int) -> dict[str, object]:
    """A question of about so many letters, and its answer; no two are alike."""
    words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(letters // 5)]
    return {"client": f"c{number % 50}", "question": f"{number}: {' '.join(words)}?", "answer": f"Bay {number % 97}."}


def write(path: Path, numbers: range, letters: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.writelines(json.dumps(row(number, letters)) + "\n" for number in numbers)
    partial.replace(path)


def make(kind: str, folder: Path) -> Path:
    """The data of a kind, written unless they are there."""
    if kind == "files":
        path = folder / "files"
        for client in range(1000):
            if not (path / f"c{client}.jsonl").exists():
                write(path / f"c{client}.jsonl", range(client * 100, client * 100 + 100), 150)
        return path
    path = folder / f"{kind}.jsonl"
    if not path.exists():
        size = len(json.dumps(row(10**6, 900))) + 1
        write(path, *((range(GB // size), 900) if kind == "large" else (range(100_000), 150)))
    return path


def measure(path: Path) -> tuple[float, float, float]:
    """Seconds of the clock, seconds of a core, and GiB at the most."""
    words = ["init", str(path), "--base", str(BASE), "--yes", "--force", "--out", str(path.parent / "made.yaml")]
    began = time.perf_counter()
    process = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-m", "llm_fed.cli", *words])
    _, status, usage = os.wait4(process, 0)
    if status:
        raise SystemExit(f"llm-fed {' '.join(words)} failed")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="+", choices=("large", "rows", "files"), default=["large", "rows", "files"])
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process would compile all its modules anew
    for kind in given.data:
        path = make(kind, given.out)
        for _ in range(given.repeats):
            clock, core, memory = measure(path)
            print(f"{kind:<6} {clock:7.1f} s by the clock, {core:7.1f} s of a core, {memory:6.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
