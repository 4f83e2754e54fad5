"""What joining a finished run is worth: the quickstart's clients are left out of the federation, one at a time.

Of each client that is left out, the exact match on its test prompts under
- `fedit`: the one adapter of a FedIT run with everybody, hence rather too good for a client that took no part;
- `join METHOD`: what `llm-fed join` makes of a run of FedMerge or FedPool without it;
- `METHOD, 20 steps`: the same after 20 steps of training on its examples, `--steps 20`;
- `METHOD, taken part`: its adapter of the run with everybody;
- `join local`: what `llm-fed join` makes of the other clients' own adapters, a pool of the most general kind;
- `local`: training alone on its 16 examples.

Runs lie in OUT and are continued. The table is OUT/join.csv, with the seconds of the slowest join of the row, without
Python's own start.

    python scripts/analysis/join.py OUT
    python scripts/analysis/join.py OUT --clients zoo-01,zoo-05,zoo-09
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from results import plain_errors, write_rows

import llm_fed
from llm_fed import configfile, tasks
from llm_fed.commands.evaluate import Data, evaluate_adapter
from llm_fed.commands.join import join
from llm_fed.commands.quickstart import ASSETS
from llm_fed.config import TaskConfig
from llm_fed.tasks import synthetic
from llm_fed.tasks.common import Example

BASE = ASSETS / "tiny-base"
POOLS = ("fedmerge", "fedpool")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--clients", default=",".join(synthetic.GROUPS), help="clients to leave out, e.g. a,b,c")
    arguments = parser.parse_args()
    with plain_errors(parser):
        rows = {client: scores(arguments.out, client) for client in arguments.clients.split(",")}
    columns = list(next(iter(rows.values())))
    rows["mean"] = {column: fmean(row[column] for row in rows.values()) for column in columns}
    write_rows(arguments.out / "join.csv", ["client", *columns], ([name, *row.values()] for name, row in rows.items()))
    print((arguments.out / "join.csv").read_text(), end="")


def scores(out: Path, client: str) -> dict[str, float]:
    """The row of one client that is left out."""
    files = {split: written(out / "data" / f"{client}-{split}.jsonl", client, split) for split in ("train", "test")}

    def score(adapter: Path) -> float:
        summary = evaluate_adapter(
            str(BASE), adapter, Data(path=files["test"]), metric="exact_match", settings=["eval.batch_size=64"]
        )
        return round(summary.mean, 1)

    def joined(run: Path, name: str, steps: int | None = None) -> Path:
        folder = out / "joined" / f"{client}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        return join(run, files["train"], folder, steps=steps).folder

    everybody = {method: trained(out, method) for method in ("fedit", "local", *POOLS)}
    others = out / "others" / client  # clients who train alone are the same whoever else there is
    shutil.rmtree(others, ignore_errors=True)
    shutil.copytree(everybody["local"], others)
    shutil.rmtree(others / "adapters" / client)
    found = {method: score(everybody[method] / "adapters" / client) for method in ("fedit", "local")}
    seconds = []
    runs = {"local": others, **{method: trained(out, method, client) for method in POOLS}}
    for method, run in runs.items():
        began = time.perf_counter()
        adapter = joined(run, method)
        seconds.append(time.perf_counter() - began)
        found[f"join {method}"] = score(adapter)
        if method in POOLS:
            found[f"{method}, 20 steps"] = score(joined(run, f"{method}-trained", steps=20))
            found[f"{method}, taken part"] = score(everybody[method] / "adapters" / client)
    return found | {"seconds": round(max(seconds), 1)}


def trained(out: Path, method: str, without: str = "all") -> Path:
    """The folder of a finished run of the quickstart's federation, of one client less if one is named."""
    tree: dict[str, Any] = configfile.as_dict(configfile.load(ASSETS / "quickstart.yaml", [f"base.name={BASE}"]))
    tree["eval"]["base"] = False
    if method != tree["method"]["name"]:
        tree["method"] = {"name": method}
    if without != "all":
        tree["task"]["groups"] = [client for client in synthetic.GROUPS if client != without]
    return llm_fed.run(tree, out=out / f"{method}-{without}").folder


def written(path: Path, client: str, split: str) -> Path:
    """A client's examples as a file of its own."""
    found: tuple[Example, ...] = getattr(tasks.load(TaskConfig("planted"), 0).clients[client], split)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": each.prompt, "output": each.answers[0]} for each in found]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
