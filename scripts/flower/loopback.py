"""A federation over Flower on this machine, with TLS and node authentication, beside the same one in one process.

    python scripts/flower/loopback.py [CONFIG.yaml] [key=value ...] --out FOLDER [--nodes 3] [--hours 1]

Without a configuration: three rounds of FedMerge on the quickstart's federation. Prints scores and how far the personal
models are apart, seconds per round, and the bytes that the run counted beside those that Flower did. The folder holds
everything: keys, logs, the run folders, each node's memories and personal models.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from deployment import Deployment
from safetensors.torch import load_file

from llm_fed import tasks
from llm_fed.commands import quickstart
from llm_fed.experiment import run as experiment
from llm_fed.network import flower_app
from llm_fed.runs.records import read_records, timed_rounds
from llm_fed.settings import configfile

QUICKSTART = quickstart.ASSETS / "quickstart.yaml"
SHORT = [f"base.name={quickstart.ASSETS / 'tiny-base'}", "rounds=3", "eval.every=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--hours", type=float, default=1.0)
    arguments = parser.parse_intermixed_args()
    named = [word for word in arguments.words if "=" not in word]
    words = [word for word in arguments.words if "=" in word]
    config = configfile.load(named[0] if named else QUICKSTART, words if named else [*SHORT, *words])
    experiment.quiet()

    clients = list(tasks.load(config.task, config.federation_seed, config.evaluation_seed).clients)
    placed = tuple(f"{client}@node-{number % arguments.nodes}" for number, client in enumerate(clients))
    config = replace(config, network=replace(config.network, clients=placed), eval=replace(config.eval, base=False))
    out = arguments.out.resolve()
    experiment.train(config, out / "here")
    flower_app.write(out / "app", config, "loopback")
    nodes: dict[str, dict[str, str | int]] = {}
    for number in range(arguments.nodes):
        theirs = ",".join(clients[number :: arguments.nodes])
        nodes[f"node-{number}"] = {"home": str(out / f"node-{number}"), "clients": theirs, "idle": 600}
        nodes[f"node-{number}"]["path"] = config.task.path or "built-in"
    with Deployment(out / "flower", nodes) as deployment:
        run = deployment.run(out / "app", {"out": str(out / "there")})
        status = deployment.wait(run, 3600 * arguments.hours)
        if status != "finished:completed":
            raise SystemExit(f"{status}\n{deployment.logs(run)}")
        traffic = deployment.describe(run)["network-traffic"]
    report(out, clients, arguments.nodes, traffic)


def report(out: Path, clients: list[str], nodes: int, traffic: dict[str, int]) -> None:
    """Print what the two runs have in common, and what they cost."""
    in_one, over_flower = (read_records(out / run / "metrics.jsonl") for run in ("here", "there"))
    scores = [[line["mean"] for line in lines if line["kind"] == "score"][-1] for lines in (in_one, over_flower)]
    print(f"test score: one process {scores[0]:.4f}, Flower {scores[1]:.4f}")
    apart = 0.0
    for number, client in enumerate(clients):
        mine = out / "here/adapters" / client
        theirs = out / f"node-{number % nodes}/adapters/there" / client
        for path in mine.rglob("*.safetensors"):
            one, other = load_file(path), load_file(theirs / path.relative_to(mine))
            apart = max(apart, *(float((one[name] - other[name]).abs().max()) for name in one))
    print(f"largest difference between personal models: {apart:.1e} (float32 eps {torch.finfo(torch.float32).eps:.1e})")
    for run in ("here", "there"):
        seconds = [line["seconds"] for line in timed_rounds(out / run)]
        print(f"seconds per round, {run}: {statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})")
    rounds = [line for line in over_flower if line["kind"] == "round"]
    up, down = (sum(line[f"bytes_{way}"] for line in rounds) for way in ("up", "down"))
    print(json.dumps({"rounds": len(rounds), "counted": {"up": up, "down": down}, "flower": traffic}))


if __name__ == "__main__":
    main()
