"""What a round costs the server, by method: floating-point operations, and bytes kept until the next (Feddle, Table 8).

1000 clients, 50 per round, all on time; LoRA (r=4 on query and value) and the head of a ViT-B/16 with random weights.
Operations are those of matrix products, convolutions and attention, counted while a step runs; sums and optimizers are
left out. A round costs a + b N + E (c S + d N) with N examples, E epochs and S optimizer steps in each; the numbers are
found by running it with one step per epoch, of one and of two examples, and with one epoch and two.

    python scripts/bench/server_cost.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from search import LOCAL, image_base, server_site, updates
from torch.utils.flop_counter import FlopCounterMode

from llm_fed.engine.drive import drive
from llm_fed.engine.engine import Engine
from llm_fed.method import Upload
from llm_fed.method.server import Server
from llm_fed.methods import build
from llm_fed.models.lora import Lora
from llm_fed.state.wire import pack

# The product of a matrix and a vector, which torch does not count by itself.
EXTRA: dict[Any, Any] = {torch.ops.aten.mv: lambda matrix, *rest, **options: 2 * math.prod(matrix)}
METHODS: dict[str, tuple[dict[str, Any], str]] = {  # settings, and which of them is the number of epochs
    "fedavg": ({}, ""),
    "fedasync": ({}, ""),
    "fedbuff": ({"buffer": 50}, ""),
    "ca2fl": ({"buffer": 50}, ""),
    "fed+ft": ({}, "server_epochs"),
    "hfcl": ({}, "local"),
    "feddf": ({}, "server_epochs"),
    "feddle": ({}, "search_epochs"),
}


class Rounds:
    """The server of one method."""

    def __init__(self, given: argparse.Namespace, name: str, site: Callable[[], Server], engine: Engine):
        self.given, self.engine, self.server, (self.settings, self.key) = given, engine, site(), METHODS[name]
        self.settings, self.pictures = {"name": name, **self.settings}, self.server.train
        model = self.server.initial()
        self.deltas = updates(model, given.cohort)
        self.state = build(self.settings).init(self.server)

    def step(self, number: int, epochs: int = 1, examples: int = 1) -> Any:
        """The state after the next answers, `cohort` of them."""
        settings = self.settings | ({self.key: epochs} if self.key not in ("", "local") else {})
        self.server.data = replace(self.server.data, train=self.pictures[:examples])
        self.server.local = replace(LOCAL, epochs=epochs if self.key == "local" else 1, batch_size=examples)
        at = number * self.given.cohort % self.given.clients
        names = self.server.clients[at : at + self.given.cohort]
        uploads = [Upload(name, 10, 0, 1.0 * delta) for name, delta in zip(names, self.deltas, strict=True)]
        self.server.begin(number + 1, 1e-3)
        work = build(settings).server_update(self.server, self.state, uploads)
        (outcome,) = drive({"server": work}, self.engine.execute).values()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def count(self, number: int, epochs: int, examples: int) -> int:
        """Operations of a step."""
        with FlopCounterMode(display=False, custom_mapping=EXTRA) as counter:
            self.step(number, epochs, examples)
        return counter.get_total_flops()

    def flops(self, number: int) -> float:
        """Operations of a round with all examples and epochs."""
        if not self.key:
            return self.count(number, 1, 1)
        given = self.given
        one, two = (self.count(number, 1, examples) for examples in (1, 2))
        epoch_of_one, epoch_of_two = (self.count(number, 2, n) - once for n, once in ((1, one), (2, two)))
        d, b = epoch_of_two - epoch_of_one, two - one - (epoch_of_two - epoch_of_one)
        c, a = epoch_of_one - d, one - epoch_of_one - b
        steps = math.ceil(given.examples / given.batch)
        return a + b * given.examples + given.epochs * (c * steps + d * given.examples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--examples", type=int, default=1000, help="examples of the server")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the server's training or search")
    parser.add_argument("--batch", type=int, default=32, help="examples per optimizer step")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    given = parser.parse_args()
    base = image_base("vit-b", given.pixels)
    structure = Lora(4, 8, 0.0, ("q_proj", "v_proj"), whole=(base.head,))
    engine = Engine(base)

    def site() -> Server:
        return server_site(base, structure, 2, given.clients, given.cohort, 1)

    megabytes = sum(parameter.numel() for parameter in base.model.parameters()) * 4 / 1e6
    print(
        f"{given.clients} clients, {given.cohort} per round; {given.examples} examples at the server, {given.epochs} "
    )
    print(f"epochs of batch {given.batch}; ViT-B/16 at {given.pixels} pixels, {megabytes:.0f} MB\n")
    print("| method | GFLOPs per round | kept beside the ViT, MB | of it one row per client, MB |\n|---|---|---|---|")
    for name in given.methods:
        rounds = Rounds(given, name, site, engine)
        # Until everybody was heard once; examples are only worked through where that fills no cache.
        last = given.clients // given.cohort if not METHODS[name][1] else 2
        for number in range(last):
            rounds.state = rounds.step(number)
        kept, cache = len(pack(rounds.state)), sum(len(pack(value)) for value in rounds.server.memory.values())
        line = f"| {name} | {rounds.flops(last) / 1e9:.3g} | {(kept + cache) / 1e6:.1f} | {cache / 1e6:.1f} |"
        print(line, flush=True)


if __name__ == "__main__":
    main()
