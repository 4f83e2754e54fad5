"""What a policy and a ledger cost a node per round, beside the same round without them, one after the other in turn.

    python scripts/bench/ledger.py [--rounds 20] [--before 1000] [--clients 4]

Each client of the quickstart's data trains with noise of its own, as it does at a node. Before the first round its
ledger has `before` lines. Without: no policy is read, no folder is measured, and nothing is looked up or written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import yaml

from llm_fed import tasks
from llm_fed.bench import build
from llm_fed.commands import quickstart
from llm_fed.network.bundle import PROTOCOL, joined
from llm_fed.network.ledger import Ledger
from llm_fed.network.node import BUILT_IN, Node, NodeSettings
from llm_fed.network.policy import Guard, Policy
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.state.wire import pack

WORDS = [
    f"base.name={quickstart.ASSETS / 'tiny-base'}", "method=fedit", "eval.base=false",
    "privacy.clip=1", "privacy.noise=1", "privacy.where=client",
]  # fmt: skip
POLICY = "noise: 0.5\nclip: 1.0\nepsilon: 100000.0\nbatch_size: 2\nrank: 64\nlayers: [q_proj, v_proj]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--before", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    config = configfile.load(quickstart.ASSETS / "quickstart.yaml", WORDS)
    names = tuple(tasks.load(config.task, config.federation_seed, config.evaluation_seed).clients)[: given.clients]
    content = pack(build.prepare(config, Reporter()).server.initial())
    text = yaml.safe_dump(configfile.as_dict(config))
    node, seconds = Node(), {True: list[float](), False: list[float]()}
    with tempfile.TemporaryDirectory() as folder:
        home, rules = Path(folder) / "home", Path(folder) / "policy.yaml"
        rules.write_text(POLICY)
        lines = {(0.5, 1.0): 1}
        for name in names:
            Ledger(home, name).write("before", "before", "", lines, None)
            path = home / "ledger" / name / "released.jsonl"
            path.write_text(path.read_text() * given.before)
        for round in range(1, given.rounds + 2):
            for guarded in (True, False) if round % 2 else (False, True):
                place = NodeSettings(home, BUILT_IN, names, policy=str(rules) if guarded else None)
                orders = [
                    {"kind": "train", "run": f"r{guarded}", "round": round, "lr": 1e-3, "after": round - 1, "kept": []}
                    | {"client": name, "ask": "1"}
                    for name in names
                ]
                entries, sent = joined(orders, [content] * len(names), once=True)
                message = {"kind": "work", "protocol": PROTOCOL, "orders": entries}
                with contextlib.redirect_stdout(io.StringIO()), contextlib.nullcontext() if guarded else unguarded():
                    began = time.perf_counter()
                    reply, _ = node.answer(place, text, message, sent)
                    seconds[guarded].append(time.perf_counter() - began)
                assert all("error" not in each for each in reply["replies"]), reply
    with_both, without = (statistics.median(seconds[guarded][1:]) for guarded in (True, False))
    ratios = sorted(one / other for one, other in zip(seconds[True][1:], seconds[False][1:], strict=True))
    print(
        f"{len(names)} clients, {given.before} lines: {1000 * with_both:.0f} ms a round, {1000 * without:.0f} without; "
        f"ratio of pairs {statistics.median(ratios):.3f} (middle half {ratios[len(ratios) // 4]:.3f} to "
        f"{ratios[-1 - len(ratios) // 4]:.3f})"
    )


@contextmanager
def unguarded() -> Iterator[None]:
    with (
        mock.patch.object(Node, "_answered", lambda self, work: self._train(work)),
        mock.patch.object(Policy, "check_room", lambda self, home: None),
        mock.patch.object(Guard, "execute", lambda self, requests: self._engine.execute(requests)),
    ):
        yield


if __name__ == "__main__":
    main()
