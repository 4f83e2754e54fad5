"""How long a worker outlives its node: what is killed, and how, with the worker idle and at work.

    python scripts/flower/kills.py --out FOLDER [--times 1]

Prints a line per case: the seconds from the kill until the worker was gone, or that it stayed, as it should where its
node goes on. Each case but the last two needs a node that Flower takes again, which lasts up to a minute.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
from deployment import Deployment

from llm_fed import tasks
from llm_fed.commands import quickstart
from llm_fed.network import flower_app
from llm_fed.settings import configfile

QUICKSTART = quickstart.ASSETS / "quickstart.yaml"
STAYS = 20.0  # seconds for which a worker is watched that should stay
LIMIT = 120.0
NODE, WORKER = "node", "llm_fed.network.worker"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=1)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    apps = write_apps(out)
    nodes = {NODE: {"home": str(out / "home"), "path": "built-in", "clients": apps["client"]}}
    with Deployment(out / "flower", nodes) as deployment:
        for busy in (False, True):
            for what, (kill, ends) in CASES.items():
                for _ in range(arguments.times):
                    seconds = measure(deployment, out, "busy" if busy else "idle", kill, ends)
                    said = f"gone after {seconds:.1f} s" if ends else f"still there after {seconds:.0f} s"
                    print(f"{what}, worker {'at work' if busy else 'idle'}: {said}", flush=True)


def write_apps(out: Path) -> dict[str, str]:
    """An app whose worker waits, as another client never comes, and one whose worker trains for hours."""
    words = [f"base.name={quickstart.ASSETS / 'tiny-base'}", "eval.every=0", "eval.base=false"]
    config = configfile.load(QUICKSTART, words)
    client, *_ = tasks.load(config.task, config.federation_seed, config.evaluation_seed).clients
    for name, clients in (("idle", (f"{client}@{NODE}", "nobody")), ("busy", (f"{client}@{NODE}",))):
        network = replace(config.network, clients=clients, deadline=7200.0, patience=7200.0)
        local = replace(config.local, steps=10_000_000)
        flower_app.write(out / name, replace(config, network=network, local=local), name)
    return {"client": client}


def measure(deployment: Deployment, out: Path, app: str, kill: Callable[[Deployment], None], ends: bool) -> float:
    """Seconds until the worker was gone, or for which it was seen to stay."""
    run = deployment.run(out / app, {"out": str(out / "runs" / f"{app}-{time.time_ns()}")})
    worker = until(lambda: next(iter(deployment.processes(NODE, WORKER)), None))
    until(lambda: f"for {deployment.nodes[NODE]['clients']}" in (out / "home/worker.log").read_text())
    if app == "busy":
        until(lambda: list((out / "home/runs").glob("*/*")))
    time.sleep(5)
    began = time.monotonic()
    kill(deployment)
    if ends:
        until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, LIMIT)
    else:
        time.sleep(STAYS)
        if not worker.is_running():
            raise SystemExit("the worker has ended, though its node goes on")
    seconds = time.monotonic() - began
    clean_up(deployment, out, run)
    return seconds


def clean_up(deployment: Deployment, out: Path, run: int) -> None:
    """The run, the node and the worker end, and a fresh node waits for the next one."""
    if not deployment.processes("superlink", "flower-superlink"):
        deployment.start_superlink()
    else:
        deployment.stop(run)
    for process in deployment.processes(NODE):
        process.kill()
    deployment.reaped(NODE)
    (out / "home/worker.log").unlink(missing_ok=True)
    deployment.start_node(NODE)


def until(true: Callable[[], object], seconds: float = 600.0) -> psutil.Process:
    """What is true in the end."""
    deadline = time.monotonic() + seconds
    while not (result := true()):
        if time.monotonic() > deadline:
            raise SystemExit(f"it did not come to that within {seconds:g} s")
        time.sleep(0.1)
    return result  # type: ignore[return-value]


def send(command: str, number: int) -> Callable[[Deployment], None]:
    """A signal to the processes of the node with this command."""

    def kill(deployment: Deployment) -> None:
        for process in deployment.processes(NODE, command):
            process.send_signal(number)
        deployment.reaped(NODE)

    return kill


def close_terminal(deployment: Deployment) -> None:
    """As a terminal does that closes: SIGHUP to all that it has started."""
    (supernode,) = deployment.processes(NODE, "flower-supernode")
    os.killpg(supernode.pid, signal.SIGHUP)
    deployment.reaped(NODE)


def suspend(deployment: Deployment) -> None:
    """As a machine that sleeps for ten seconds."""
    processes = [*deployment.processes(NODE, "flower-supernode"), *deployment.processes(NODE, "flower-superexec")]
    for process in processes:
        process.suspend()
    time.sleep(10)
    for process in processes:
        process.resume()


# By what is done, how, and whether the worker ends.
CASES: dict[str, tuple[Callable[[Deployment], None], bool]] = {
    "SuperNode SIGKILL": (send("flower-supernode", signal.SIGKILL), True),
    "SuperNode SIGTERM": (send("flower-supernode", signal.SIGTERM), True),
    "SuperExec SIGKILL": (send("flower-superexec", signal.SIGKILL), True),
    "terminal closed": (close_terminal, True),
    "node suspended for 10 s": (suspend, False),
    "SuperLink SIGKILL": (lambda deployment: deployment.kill("superlink", "flower-superlink"), False),
}


if __name__ == "__main__":
    main()
