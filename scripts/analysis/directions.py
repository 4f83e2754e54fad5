"""Whether data of another domain point a search of merging coefficients the same way as data of the clients' own: the
cosine of the two gradients by the coefficients, at each checkpoint of a run (Feddle, Figures 7 and 9).

RUN searched with out-of-domain data (task.server.name) and kept the test pictures at the server (task.server.test);
checkpoint.keep_rounds says of which rounds there are checkpoints. A checkpoint is taken after the round's step, so the
step is taken back first: omega of the search is the model minus the found coefficients times the normalised anchors.
There both gradients are taken, with the fallback added (where the search starts) and without (where it would start
without the fallback). -d loss / dc is the same projection of the model's gradient for both; what differs is the loss:
own domain   cross-entropy of the server's test pictures under the model's own head
other domain cross-entropy of the server's training pictures under the head that the run fitted to them in that round
Both starts are judged under that one head, as the run's own search would be with either start.
Writes RUN/analysis/directions.csv and .png.

    python scripts/analysis/directions.py RUN --examples 1000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from results import plain_errors, write_rows
from rich.console import Console
from searches import at_server, before_search, searches
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench import build
from llm_fed.eval.plots import plot_bands
from llm_fed.method.server import Server
from llm_fed.runs.reading import read_config
from llm_fed.runs.tracking import Reporter
from llm_fed.state import State

CHUNK = 100  # pictures per pass
STARTS = ("fallback", "zero")


async def slope(server: Server, model: State, atlas: Tensor, examples: Sequence[Any], head: State | None) -> Tensor:
    """The gradient of the examples' mean loss by the coefficients, (M,), in float64."""
    total = torch.zeros(len(atlas), dtype=torch.float64)
    for at in range(0, len(examples), CHUNK):
        batch = examples[at : at + CHUNK]
        _, gradient = await server.gradient(model, batch, head=head)
        total += len(batch) * (atlas @ gradient.row).double()
    return total / len(examples)


def cosines(built: build.Experiment, state: dict[str, Any], examples: int) -> list[float]:
    """Of one checkpoint's state, by STARTS."""
    server = built.server
    omega, atlas = before_search(built, state)
    fallback = torch.tensor(state["search"]["fallback"]).to(atlas)

    async def both() -> list[float]:
        cosines = []
        for start in (fallback, torch.zeros_like(fallback)):
            model = omega.like(omega.row + start @ atlas)
            own = await slope(server, model, atlas, server.data.queries["test"][:examples], None)
            other = await slope(server, model, atlas, server.train[:examples], state["head"])
            cosines.append(float(torch.nn.functional.cosine_similarity(own, other, dim=0)))
        return cosines

    return at_server(built, both())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--examples", type=int, default=1000, help="most examples of each domain")
    given = parser.parse_args()
    with plain_errors(parser):
        built = build.prepare(read_config(given.run), Reporter(Console(quiet=True)))
        if not (built.server.data.foreign and built.server.data.queries.get("test")):
            raise UserError(
                f"{given.run}: the server needs data of another domain (task.server.name) and the test split"
            )
        rows = []
        for round, state in searches(given.run, built):
            if not state["head"]:
                raise UserError(f"{given.run} searched under its own head, not one for data of another domain")
            rows.append((round, len(state["anchors"]), *cosines(built, state, given.examples)))
            print(*rows[-1], flush=True)
        folder = write_rows(given.run / "analysis" / "directions.csv", ("round", "anchors", *STARTS), rows)
        numbers, curves = [row[0] for row in rows], {}
        for place, name in enumerate(STARTS, start=2):
            values = [row[place] for row in rows]
            curves[f"at the {name}" if name == "fallback" else "at zero"] = (numbers, values, values, values)
        plot_bands(folder / "directions.png", curves, xlabel="round", ylabel="cosine of the gradients")


if __name__ == "__main__":
    with lasting_streams():
        main()
