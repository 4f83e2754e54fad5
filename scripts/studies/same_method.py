"""Comparisons of a method with itself on toy federations, and how many of them claim a difference that is none.

Each comparison has `--draws` federations of random shares of small random pictures, and on each trains one method
twice, with different training seeds: the rows `a` and `b`. It goes through llm_fed's round loop, run folders and
verdict. Claims should be 5 % of the comparisons; an exact binomial test says whether they are.

    nice -n 19 python scripts/studies/same_method.py --comparisons 200 --out runs/analysis/same_method.jsonl

The file holds a line per comparison; the same command goes on after the last one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from scipy.stats import binomtest

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench.bases import Bases
from llm_fed.eval.pairs import critical
from llm_fed.eval.scripting import plain_errors
from llm_fed.eval.verdict import Scored, Verdict
from llm_fed.experiment import finish, run
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict
from llm_fed.testing import tiny

CLIENTS, CLASSES, SIZE = 3, 4, 32  # SIZE in pixels
EXAMPLES = {"train": 96, "test": 96}


def write_pictures(path: Path) -> None:
    """One npz file, the pool of which each federation is a partition."""
    splits: dict[str, Any] = {}
    for number, (split, count) in enumerate(EXAMPLES.items()):
        pixels, labels = tiny.arrays(count, seed=number, classes=CLASSES, size=SIZE)
        splits |= {f"x_{split}": pixels, f"y_{split}": labels}
    np.savez(path, **splits)


def configuration(data: Path, method: str, federation: int, training: int) -> dict[str, Any]:
    """One round of a tiny model at a learning rate at which runs end with different scores."""
    return {
        "seeds": {"federation": federation, "training": training},
        "rounds": 1,
        "base": {"name": "cnn"},
        "adapter": None,
        "task": {
            "name": "images",
            "path": str(data),
            "validation": 0.0,
            "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 1.0},
        },
        "method": {"name": method},
        "local": {"steps": 6, "batch_size": 8, "lr": 0.01, "lr_end": 0.01, "optimizer": "adam"},
        "eval": {"every": 0, "select": "last"},
        "export": {"clients": "none"},
        "device": "cpu",
    }


def compare(number: int, draws: int, method: str, data: Path, bases: Bases) -> dict[str, Any]:
    """One comparison: whether its only pair claims something, and the scores behind it."""
    rows: dict[str, list[Scored]] = {"a": [], "b": []}
    for draw in range(draws):
        federation = number * draws + draw
        for place, scored in enumerate(rows.values()):
            training = 1_000_000 + 2 * federation + place
            config = from_dict(configuration(data, method, federation, training))
            with TemporaryDirectory() as folder:
                quiet = Reporter(Console(quiet=True))
                done = run.train(config, Path(folder) / "run", reporter=quiet, base=bases.of(config))
            scores = done["scores"]
            scored.append(Scored(federation, 0, scores["clients"]))
    (pair,) = Verdict.of_runs(rows).column.pairs
    return {
        "comparison": number,
        "draws": draws,
        "method": method,
        "claims": {"average": pair.claim == "greater"},
        "scores": {name: [round(fmean(run.clients.values()), 4) for run in scored] for name, scored in rows.items()},
    }


def redrawn(lines: list[dict[str, Any]], count: int = 200_000) -> float:
    """The share of claims on the average among `count` comparisons of differences drawn anew from all that were seen,
    with random signs: how the verdict does with this noise, without the luck of the comparisons that were made."""
    rng, draws = np.random.default_rng(0), lines[0]["draws"]
    seen = np.ravel([np.subtract(line["scores"]["a"], line["scores"]["b"]) for line in lines])
    drawn = rng.choice(seen, (count, draws)) * rng.choice([-1, 1], (count, draws))
    errors = drawn.std(axis=1, ddof=1) / draws**0.5
    return float((np.abs(drawn.mean(axis=1)) > critical(2, draws - 1) * errors).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--method", default="local")
    parser.add_argument("--out", type=Path, default=Path("runs/analysis/same_method.jsonl"))
    asked = parser.parse_args()
    run.quiet()
    finish.write_report = lambda folder: None  # type: ignore[assignment]  # takes longer than the training
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    data, bases = asked.out.with_suffix(".npz"), Bases()
    with plain_errors(parser):
        if not data.exists():
            write_pictures(data)
        lines = read_records(asked.out)
        if any((line["draws"], line["method"]) != (asked.draws, asked.method) for line in lines):
            raise UserError(f"{asked.out} holds comparisons of another method or number of draws; give another --out")
        for number in range(len(lines), asked.comparisons):
            lines.append(compare(number, asked.draws, asked.method, data, bases))
            with open(asked.out, "a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            if (number + 1) % 10 == 0:
                print(f"{number + 1} of {asked.comparisons} comparisons", flush=True)
    for name in lines[0]["claims"]:
        claims = sum(line["claims"][name] for line in lines)
        test = binomtest(claims, len(lines), 0.05)
        between = test.proportion_ci()
        print(
            f"{name}: {claims} of {len(lines)} comparisons claim a difference, {claims / len(lines):.1%} "
            f"[{between.low:.1%}, {between.high:.1%}]; exact binomial test of 5 %: p = {test.pvalue:.2f}"
        )
    print(f"differences drawn anew: {redrawn(lines):.1%} claims on the average")


if __name__ == "__main__":
    with lasting_streams():
        main()
