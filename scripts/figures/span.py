"""Whether a search of merging coefficients leaves anything behind: losses on the server's own data and on the test
pictures after the step that a run took, and after a much longer search in the same span (Feddle, Eq. 5).

RUN searched with data of its own domain and kept the test pictures at the server (task.server.test). At each of its
checkpoints the round's step is taken back, and the loss is measured there (zero), at the fallback, at the coefficients
that the run found, and at those of a longer search from the fallback: Adam, half of the epochs at 1e-2, half at 1e-3.
Where the longer search gains on the server's data alone, it is the span, the clients' updates, that has no more to
give, not the search. Writes RUN/analysis/span.csv.

    python scripts/figures/span.py RUN --epochs 40
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from searches import at_server, before_search, searches
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench import build
from llm_fed.eval.scripting import plain_errors, write_rows
from llm_fed.method.server import Server
from llm_fed.runs.reading import read_config
from llm_fed.runs.tracking import Reporter
from llm_fed.state import State

STEPS = (1e-2, 1e-3)  # of Adam, by halves of the search


async def places(
    server: Server, omega: State, atlas: Tensor, search: dict[str, Any], epochs: int
) -> AsyncIterator[tuple[str, State]]:
    """The four models, by name."""
    start = torch.tensor(search["fallback"]).to(atlas)
    yield "zero", omega
    yield "fallback", omega.like(omega.row + start @ atlas)
    yield "found", omega.like(omega.row + torch.tensor(search["coefficients"]).to(atlas) @ atlas)
    coefficients = torch.nn.Parameter(start.clone())
    for lr in STEPS:
        optimizer = torch.optim.Adam([coefficients], lr=lr)
        for batch in server.batches(epochs=epochs // 2):
            _, gradient = await server.gradient(omega.like(omega.row + coefficients.detach() @ atlas), batch)
            coefficients.grad = atlas @ gradient.row
            optimizer.step()
    yield "longer", omega.like(omega.row + coefficients.detach() @ atlas)


async def losses(built: build.Experiment, state: dict[str, Any], epochs: int) -> list[tuple[str, float, float]]:
    """Of one checkpoint: name, mean loss on the server's examples, mean loss on the test pictures."""
    server, rows = built.server, []
    omega, atlas = before_search(built, state)
    async for name, model in places(server, omega, atlas, state["search"], epochs):
        (own,) = await server.losses_of([model], server.train)
        (test,) = await server.losses_of([model], server.data.queries["test"])
        rows.append((name, own, test))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--epochs", type=int, default=40, help="epochs of the longer search")
    given = parser.parse_args()
    with plain_errors(parser):
        built = build.prepare(read_config(given.run), Reporter(Console(quiet=True)))
        server, rows = built.server, []
        if server.data.foreign or not (server.train and server.data.queries.get("test")):
            raise UserError(f"{given.run}: the server needs examples of the clients' own domain and the test split")
        for round, state in searches(given.run, built):
            outcome = at_server(built, losses(built, state, given.epochs))
            rows += [(round, *row) for row in outcome]
            for row in outcome:
                print(round, row[0], *(f"{loss:.3f}" for loss in row[1:]), flush=True)
        write_rows(given.run / "analysis" / "span.csv", ("round", "at", "server", "test"), rows)


if __name__ == "__main__":
    with lasting_streams():
        main()
