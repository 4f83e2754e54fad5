"""What a round over Flower takes beside a message that does nothing: three nodes of 1, 4 and 16 tiny clients each.

    python scripts/bench/network.py [--clients 1,4,16] [--rounds 6] [--sittings 2] [--nodes 3]

Everything runs on this machine, in one deployment of processes of their own (SuperLink and SuperNodes with TLS and
keys), the variants in turn in each sitting. Each round trains every client for one step and scores it. A run's first
round has an order more, as nothing travelled ahead of it, and the last one scores alone: both are left out. Nothing is
written outside a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from llm_fed.commands import quickstart
from llm_fed.network import flower_app
from llm_fed.runs.records import timed_rounds
from llm_fed.settings.configfile import from_dict

FLOWER = Path(__file__).parents[1] / "flower"
sys.path.insert(0, str(FLOWER))

from deployment import Deployment  # noqa: E402

EMPTY = "a message that does nothing"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,4,16", help="clients per node, one variant for each number")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sittings", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=3)
    given = parser.parse_args()
    numbers = [int(number) for number in given.clients.split(",")]
    seconds: dict[str, list[float]] = {name: [] for name in (EMPTY, *map(_label, numbers))}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        names = [f"node-{number}" for number in range(given.nodes)]
        nodes: dict[str, dict[str, str | int | float | bool]] = {}
        for name in names:
            theirs = [f"{name}-{number}" for number in range(max(numbers))]
            _write_data(out / f"data-{name}", theirs)
            nodes[name] = {"home": str(out / f"home-{name}"), "path": str(out / f"data-{name}"), "idle": 3600}
            nodes[name]["clients"] = ",".join(theirs)
        for number in numbers:
            clients = [f"{name}-{client}@{name}" for name in names for client in range(number)]
            flower_app.write(out / f"app-{number}", from_dict(_tree(clients, given.rounds)), f"clients-{number}")
        with Deployment(out / "deployment", nodes) as deployment:
            for sitting in range(given.sittings):
                seconds[EMPTY] += _empty(deployment, given.nodes, given.rounds)
                for number in numbers:
                    seconds[_label(number)] += _federated(deployment, out, number, sitting)
    reference = statistics.median(seconds[EMPTY])
    print("| three nodes, each with | s per round, median | lowest | highest | empty = 1 |\n|---|---|---|---|---|")
    for name, measured in seconds.items():
        median = statistics.median(measured)
        print(f"| {name} | {median:.1f} | {min(measured):.1f} | {max(measured):.1f} | {median / reference:.2f} |")


def _label(number: int) -> str:
    return f"{number} client{'s' if number > 1 else ''}"


def _write_data(folder: Path, clients: list[str]) -> None:
    """A row: {"instruction": "Say 3.", "output": "three 3"}"""
    for client in clients:
        (folder / client).mkdir(parents=True)
        for split, size in (("train", 8), ("validation", 2), ("test", 2)):
            rows = [{"instruction": f"Say {number}.", "output": f"three {number}"} for number in range(size)]
            (folder / client / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _tree(clients: list[str], rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "base": {"name": str(quickstart.ASSETS / "tiny-base"), "dtype": "float32"},
        "adapter": {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "task": {"name": "files", "max_length": 64, "template": "plain"},
        "method": {"name": "fedit"},
        "local": {"steps": 1, "batch_size": 8, "lr": 0.01},
        "eval": {"every": 1, "metric": "exact_match", "max_new_tokens": 2},
        "export": {"clients": "none"},
        "network": {"clients": clients},
        "device": "cpu",
    }


def _empty(deployment: Deployment, nodes: int, rounds: int) -> list[float]:
    run = deployment.run(FLOWER / "hello", {"nodes": nodes, "rounds": rounds, "size": 1000})
    said = _ended(deployment, run)
    return [json.loads(line)["seconds"] for line in said.splitlines() if line.startswith('{"round"')][1:]


def _federated(deployment: Deployment, out: Path, number: int, sitting: int) -> list[float]:
    folder = out / f"run-{number}-{sitting}"
    _ended(deployment, deployment.run(out / f"app-{number}", {"out": str(folder)}))
    return [line["seconds"] for line in timed_rounds(folder)][1:-1]


def _ended(deployment: Deployment, run: int) -> str:
    """What the run has printed; SystemExit where it has not been completed."""
    status = deployment.wait(run, seconds=1800)
    if status != "finished:completed":
        raise SystemExit(f"network.py: the run is {status}:\n{deployment.logs(run)}")
    return deployment.logs(run)


if __name__ == "__main__":
    main()
