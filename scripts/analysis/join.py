"""What joining a finished run is worth: clients are left out of a federation, one at a time.

Of each client that is left out, the test score under
- `fedit`: the one adapter of a FedIT run with everybody, hence rather too good for a client that took no part;
- `join METHOD`: what `llm-fed join` makes of a run of FedMerge or FedPool without it and `--examples` of its examples;
- `METHOD, 20 steps`: the same after 20 steps of training on these examples, `--steps 20`;
- `METHOD, taken part`: its adapter of the run with everybody, for which it trained on all its examples;
- `join local`: what `llm-fed join` makes of the other clients' own adapters, a pool of the most general kind;
- `local`: training alone on the same few examples.

Runs lie in OUT and are continued. The table is OUT/join.csv, with the seconds of the slowest join of the row, without
Python's own start.

    python scripts/analysis/join.py OUT                    # the quickstart's federation
    python scripts/analysis/join.py OUT --clients zoo-01,zoo-05,zoo-09
    python scripts/analysis/join.py OUT --config scripts/runs/flan_methods.yaml base.name=BASE task.path=FLAN
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from results import plain_errors, write_rows

import llm_fed
from llm_fed import tasks
from llm_fed.basics.errors import UserError, lookup
from llm_fed.basics.terminal import lasting_streams
from llm_fed.commands.evaluate import EvaluationData, evaluate_adapter
from llm_fed.commands.join import join
from llm_fed.commands.quickstart import ASSETS
from llm_fed.settings import configfile
from llm_fed.settings.config import Config
from llm_fed.tasks.common import ClientData, Example

POOLS: dict[str, dict[str, Any]] = {"fedmerge": {"name": "fedmerge", "num_models": 4}, "fedpool": {"name": "fedpool"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value settings of the federation")
    parser.add_argument("--config", type=Path, default=ASSETS / "quickstart.yaml", help="a run file")
    parser.add_argument("--clients", help="clients to leave out, e.g. a,b,c (default: each in turn)")
    parser.add_argument("--examples", type=int, default=16, help="that a client has who joins")
    asked = parser.parse_intermixed_args()
    with plain_errors(parser):
        words = [f"base.name={ASSETS / 'tiny-base'}"] if asked.config == parser.get_default("config") else []
        config = configfile.load(asked.config, [*words, *asked.settings])
        left_out = LeftOut(config, tasks.load(config.task, config.federation_seed).clients, asked.out, asked.examples)
        names = asked.clients.split(",") if asked.clients else list(left_out.clients)
        rows = {client: left_out.scores(client) for client in names}
    columns = list(next(iter(rows.values())))
    rows["mean"] = {column: fmean(row[column] for row in rows.values()) for column in columns}
    write_rows(asked.out / "join.csv", ["client", *columns], ([name, *row.values()] for name, row in rows.items()))
    print((asked.out / "join.csv").read_text(), end="")


@dataclass(frozen=True)
class LeftOut:
    """A federation whose clients are left out one at a time."""

    config: Config
    clients: dict[str, ClientData]
    out: Path
    examples: int

    def scores(self, client: str) -> dict[str, float]:
        """The row of one client that is left out."""
        own = lookup("--clients", client, self.clients)
        train = written(self.out / "train" / client / f"{client}-train.jsonl", own.train[: self.examples])
        test = written(self.out / "test" / f"{client}.jsonl", own.test[: self.config.eval.limit])

        def joined(run: Path, name: str, steps: int | None = None) -> Path:
            folder = self.out / "joined" / f"{client}-{name}"
            shutil.rmtree(folder, ignore_errors=True)
            return join(run, train, folder, examples=self.examples, steps=steps).folder

        everybody = {method: self.trained(method) for method in ("fedit", "local", *POOLS)}
        others = self.out / "others" / client  # clients who train alone are the same whoever else there is
        shutil.rmtree(others, ignore_errors=True)
        shutil.copytree(everybody["local"], others)
        shutil.rmtree(others / "adapters" / client)
        alone = everybody["local"] / "adapters" / client
        if len(own.train) > self.examples:
            (alone,) = (self.alone(client, train) / "adapters").iterdir()
        scores = {"fedit": self.score(everybody["fedit"] / "adapters" / client, test), "local": self.score(alone, test)}
        seconds = []
        pools = {"local": others, **{method: self.trained(method, client) for method in POOLS}}
        for method, run in pools.items():
            began = time.perf_counter()
            adapter = joined(run, method)
            seconds.append(time.perf_counter() - began)
            scores[f"join {method}"] = self.score(adapter, test)
            if method in POOLS:
                scores[f"{method}, 20 steps"] = self.score(joined(run, f"{method}-trained", steps=20), test)
                scores[f"{method}, taken part"] = self.score(everybody[method] / "adapters" / client, test)
        return scores | {"seconds": round(max(seconds), 1)}

    def score(self, adapter: Path, test: Path) -> float:
        eval, base = self.config.eval, self.config.base
        settings = [f"eval.batch_size={eval.batch_size}", f"eval.max_new_tokens={eval.max_new_tokens}"]
        data = EvaluationData(path=test, dtype=base.dtype)
        return round(evaluate_adapter(base.name, adapter, data, metric=eval.metric, settings=settings).mean, 1)

    def trained(self, method: str, without: str = "all") -> Path:
        """The folder of a finished run, of one client less if one is named."""
        tree = self.tree(POOLS.get(method, {"name": method}))
        if without != "all":
            tree["task"]["groups"] = [client for client in self.clients if client != without]
        return llm_fed.run(tree, out=self.out / f"{method}-{without}").folder

    def alone(self, client: str, train: Path) -> Path:
        """The folder of a run in which this client trains alone on the file."""
        tree = self.tree({"name": "local"})
        tree["task"] |= {"name": "files", "path": str(train.parent), "groups": None, "validation": 0.0}
        tree["eval"] |= {"every": 0, "select": "last"}
        return llm_fed.run(tree, out=self.out / "alone" / client).folder

    def tree(self, method: dict[str, Any]) -> dict[str, Any]:
        tree: dict[str, Any] = configfile.as_dict(self.config)
        tree["eval"]["base"] = False
        return tree if method["name"] == tree["method"]["name"] else tree | {"method": method}


def written(path: Path, examples: Sequence[Example]) -> Path:
    """A client's examples as a file of its own.

    Raises:
        UserError: an example has several right answers, which such a file cannot hold.
    """
    if any(len(each.answers) != 1 for each in examples):
        raise UserError(f"{path.stem} has examples with several answers; give a task with one answer for each prompt")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": each.prompt, "output": each.answers[0]} for each in examples]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    with lasting_streams():
        main()
