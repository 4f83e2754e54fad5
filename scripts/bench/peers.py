"""Times rounds of federated LoRA beside what others would write for the same work: seconds, tokens and peak memory.

- `ours`: llm_fed's loop with its fused cohort, messages, metrics and a checkpoint in every round; nobody is scored.
- `peft`: a plain loop of PyTorch and PEFT over rounds and clients.
- `trl`: a new SFTTrainer for each client and round (pip install trl).
- `flower`: the plain loop in the clients of Flower's simulation (pip install 'flwr[simulation]').
- `floor`: forward, backward and step alone, of one adapter on batches that are padded before the clock runs.

All start from one adapter and take the same steps on the same examples: FedIT, AdamW, float32, no dropout. The others
are given tokens, where TRL would tokenise in every round. What they end with must be what `ours` ends with, and the
tokens that their models read must be as many. Each peer is a process of its own in each repeat, the peers take turns,
and the first round of each process does not count. Memory is that of the process and its children, sampled every 50 ms,
with the pages that they share counted once.

    python scripts/bench/peers.py --base BASE --data FLAN --steps 4
    python scripts/bench/peers.py --base BASE --data FLAN --clients 100 --asked 10 --steps 4

Without --base and --data: the tiny base that llm_fed ships, on the quickstart's planted clients.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from peer_loops import PEERS, Adapter, Asked, entry_of_peft
from rich.console import Console
from safetensors.torch import load_file, save_file

from llm_fed import tasks
from llm_fed.bench.build import Experiment, prepare
from llm_fed.experiment.run import quiet
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.tasks.common import Encoded

LOOPS = Path(__file__).with_name("peer_loops.py")
TINY_BASE = Path(__file__).parents[2] / "llm_fed" / "assets" / "tiny-base"
NEEDED = {"trl": ("trl",), "flower": ("flwr", "ray")}  # packages that llm_fed does without
NEAR = 0.01  # of the way that training went: how far results of equal work may lie apart, by rounding


@dataclass
class Found:
    """Of one peer, over its repeats."""

    seconds: list[float] = field(default_factory=list)  # of each round that counts
    tokens: list[int] = field(default_factory=list)  # of the same rounds
    memory: float = 0.0  # the highest peak, MiB
    apart: float | None = None  # how far its result is from that of the first peer


def settings(args: argparse.Namespace) -> list[str]:
    """Of llm_fed, for the work that all do."""
    words = [
        f"base.name={args.base or TINY_BASE}", "base.dtype=float32", "device=cpu", "method=fedit",
        f"rounds={args.rounds + 1}", f"participation={args.asked / args.clients}", "adapter.rank=8", "adapter.alpha=16",
        "adapter.dropout=0", "adapter.target_modules=[q_proj,v_proj]", "task.max_length=512", "task.validation=0",
        f"local.steps={args.steps}", f"local.batch_size={args.batch_size}", f"local.lr={args.lr}",
        f"local.lr_end={args.lr}", "eval.every=0", "eval.select=last",
        *(["task.name=flan", f"task.path={args.data}"] if args.data else ["task.name=planted"]),
    ]  # fmt: skip
    config = configfile.load({}, words)
    natural = len(tasks.load(config.task, config.federation_seed, config.evaluation_seed).clients)
    if args.clients > natural:  # each is divided
        words += ["task.partition.kind=split", f"task.partition.clients={-(-args.clients // natural)}"]
    return [*words, f"task.clients={args.clients}"]


def built(words: Sequence[str]) -> Experiment:
    quiet()
    return prepare(configfile.load({}, words), Reporter(Console(quiet=True)))


def planned(experiment: Experiment) -> list[list[Asked]]:
    """Who is asked in each round, and the examples of each step, as llm_fed's clients would draw them."""
    config, sites = experiment.config, experiment.clients
    numbers = {id: number for number, id in enumerate(sites)}

    def asked(id: str, round: int) -> Asked:
        site = sites[id]
        site.begin(round, config.local.lr)
        batches = [[example_of(site.train[i]) for i in step] for step in site.indices(len(site.train))]
        return {"client": id, "number": numbers[id], "num_examples": site.num_examples, "batches": batches}

    rounds = range(1, config.rounds + 1)
    return [[asked(ask.client, round) for ask in experiment.schedule.asks(round)] for round in rounds]


def example_of(example: Encoded) -> tuple[list[int], list[int]]:
    """Token ids, and labels with -100 where a token is not in the loss."""
    ids = list(example.input_ids)
    return ids, [id if target else -100 for id, target in zip(ids, example.target, strict=True)]


def tokens_of(clients: Sequence[Asked]) -> int:
    """How many tokens the clients of a round train on, without padding."""
    return sum(len(ids) for client in clients for batch in client["batches"] for ids, _ in batch)


def write_work(folder: Path, args: argparse.Namespace) -> list[list[Asked]]:
    """What `peer_loops.Work` reads; returns the rounds."""
    experiment = built(words := settings(args))
    start, adapter = experiment.server.initial(), experiment.config.adapter
    assert adapter is not None
    rounds = planned(experiment)
    given: dict[str, Any] = {
        "settings": words, "base": experiment.config.base.name, "adapter": asdict(adapter), "lr": args.lr,
        "threads": args.threads, "actors": args.actors, "clients": args.clients, "rounds": rounds,
    }  # fmt: skip
    (folder / "work.json").write_text(json.dumps(given))
    save_file({entry_of_peft(name): start[name].clone() for name in start}, folder / "start.safetensors")
    return rounds


def measured(peer: str, folder: Path) -> tuple[dict[str, Any], float]:
    """What one process of a peer says, and its peak memory in MiB.

    Raises:
        SystemExit: it failed, with the end of what it printed.
    """
    out, peak = folder / f"{peer}.log", 0
    with open(out, "w") as file:
        process = subprocess.Popen([sys.executable, str(LOOPS), peer, str(folder)], stdout=file, stderr=file)
        while process.poll() is None:
            peak = max(peak, resident(psutil.Process(process.pid)))
            time.sleep(0.05)
    lines = out.read_text().splitlines()
    said = [line for line in lines if line.startswith('{"seconds"')]
    if process.returncode or not said:
        raise SystemExit("\n".join([*lines[-15:], f"peers.py: {peer} ended with exit code {process.returncode}"]))
    return json.loads(said[-1]), peak / 2**20


def resident(process: psutil.Process) -> int:
    """Bytes of memory of a process and its children, what they share counted once."""
    own, shared = 0, 0
    try:
        for each in [process, *process.children(recursive=True)]:
            memory = each.memory_info()
            own, shared = own + memory.rss - memory.shared, max(shared, memory.shared)
    except psutil.NoSuchProcess:  # one has just ended; the next sample counts the others
        pass
    return own + shared


def apart(one: Adapter, other: Adapter, start: Adapter) -> float:
    """The distance of two results, as a share of the way from the start to the second."""
    rows = [torch.cat([each[name].flatten().double() for name in sorted(start)]) for each in (one, other, start)]
    return float((rows[0] - rows[1]).norm() / (rows[1] - rows[2]).norm())


def table(results: Mapping[str, Found]) -> str:
    first = statistics.median(next(iter(results.values())).seconds)
    name = next(iter(results))
    lines = [
        f"| peer | s per round | lowest to highest | {name} = 1 | tokens/s | peak memory, MiB | result apart |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for peer, result in results.items():
        median = statistics.median(result.seconds)
        speed = sum(result.tokens) / sum(result.seconds)
        lines.append(
            f"| {peer} | {median:.2f} | {min(result.seconds):.2f}-{max(result.seconds):.2f} | {median / first:.2f} | "
            f"{speed:,.0f} | {result.memory:,.0f} | {'' if result.apart is None else f'{result.apart:.0e}'} |"
        )
    return "\n".join(lines)


def installed(peers: Sequence[str]) -> list[str]:
    """The peers whose packages are here; says why the others are left out."""
    chosen = []
    for peer in peers:
        if missing := [name for name in NEEDED.get(peer, ()) if importlib.util.find_spec(name) is None]:
            print(f"{peer} is left out: {' and '.join(missing)} is not installed (see --help)", flush=True)
        else:
            chosen.append(peer)
    return chosen


def compare(args: argparse.Namespace, peers: Sequence[str], folder: Path) -> dict[str, Found]:
    """All repeats of all peers, in turn.

    Raises:
        SystemExit: a peer failed, or has not done the same work.
    """
    rounds = write_work(folder, args)
    expected, start = [tokens_of(clients) for clients in rounds], load_file(folder / "start.safetensors")
    results = {peer: Found() for peer in peers}
    for repeat in range(args.repeats):
        for peer, result in results.items():
            said, peak = measured(peer, folder)
            rounds_said = ", ".join(f"{seconds:.2f}" for seconds in said["seconds"])
            print(
                f"{repeat + 1} of {args.repeats}: {peer} {rounds_said} s, {peak:,.0f} MiB", file=sys.stderr, flush=True
            )
            if said["tokens"] != expected:
                raise SystemExit(f"peers.py: {peer} read {said['tokens']} tokens, and planned were {expected}")
            result.seconds += said["seconds"][1:]
            result.tokens += said["tokens"][1:]
            result.memory = max(result.memory, peak)
            if peer not in (peers[0], "floor"):
                one, other = (load_file(folder / f"{name}.safetensors") for name in (peer, peers[0]))
                result.apart = apart(one, other, start)
                if not result.apart < NEAR:
                    raise SystemExit(
                        f"peers.py: {peer} ends {result.apart:.2g} of the way from what {peers[0]} ends with"
                    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a folder with a model and its tokenizer")
    parser.add_argument("--data", help="Flan, one folder per client; more clients than that divide theirs")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--asked", type=int, help="in each round (default: all)")
    parser.add_argument("--steps", type=int, default=4, help="local steps")
    parser.add_argument("--rounds", type=int, default=3, help="that count, in each process")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each peer")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS, help="the first is the measure")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--actors", type=int, default=1, help="clients that flower trains at once, sharing the threads")
    args = parser.parse_args()
    args.asked = args.asked or args.clients
    if not 0 < args.asked <= args.clients:
        parser.error(f"--asked {args.asked} of --clients {args.clients}")
    if not (peers := installed(args.peers)):
        raise SystemExit("peers.py: none of the peers that were asked for is installed")
    with tempfile.TemporaryDirectory() as folder:
        results = compare(args, peers, Path(folder))
    print(
        f"{args.asked} of {args.clients} clients, {args.steps} steps, batch {args.batch_size}, {args.threads} threads"
    )
    print(f"torch {torch.__version__}, {args.repeats} x {args.rounds} rounds\n\n{table(results)}")


if __name__ == "__main__":
    main()
