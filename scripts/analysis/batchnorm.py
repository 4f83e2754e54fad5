"""What averaging BatchNorm's statistics over clients costs: personal models scored as they are, with the statistics of
all clients' training pictures together, and with those of the client's own (as AdaBN, Li et al. 2017).

Nothing is trained: means and variances of a finished run's exported models are computed anew by forward passes, one
layer after the other being fed what the new statistics of the layers before make of the pictures; weights stay. Each
client's test pictures decide. Writes RUN/analysis/batchnorm.csv, and a table.

    python scripts/analysis/batchnorm.py RUN
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from results import plain_errors, write_rows
from rich.console import Console
from rich.table import Table
from torch import nn

from llm_fed.errors import UserError
from llm_fed.eval.runs import read_config, reopen
from llm_fed.models.images import ImageBase
from llm_fed.rng import generator
from llm_fed.site import Site
from llm_fed.state import State
from llm_fed.structure import Structure
from llm_fed.tasks.common import Picture, labels_of, pixels_of

BATCH = 256  # pictures whose statistics are one term of the mean
COLUMNS = ("as it is", "of all clients", "of its own")


def recomputed(base: ImageBase, structure: Structure, state: State, pictures: Sequence[Picture]) -> State:
    """`state` with the statistics that the pictures have in it: means over their batches, in the order given.

    Raises:
        UserError: the model has no BatchNorm that keeps statistics.
    """
    flat = base.flat(structure)
    flat.load(state)
    layers = [
        m
        for m in flat.module.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    if not layers:
        raise UserError("the models have no BatchNorm, so there are no statistics to compute anew")
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # torch's word for a mean over all batches
        layer.train()
    count = max(1, round(len(pictures) / BATCH))
    with torch.no_grad():
        for nth in range(count):
            flat.module(base.prepare(pixels_of(pictures[nth::count])))
    return flat.read()


def accuracies(run: Path) -> dict[str, tuple[float, ...]]:
    """By client, in percent of its test pictures: one number for each of COLUMNS.

    Raises:
        UserError: the run is not finished, trained adapters, or has no test pictures or no BatchNorm.
    """
    config = read_config(run)
    if config.adapter is not None:
        raise UserError(f"{run} trained adapters; give a run of whole image models, with adapter: null")
    built, states = reopen(run, config)
    base = built.base
    assert isinstance(base, ImageBase)  # only image models train whole
    sites = {id: site for id, site in built.clients.items() if site.queries.get("test") and site.train}
    if not sites:
        raise UserError(f"{run}: no client has both training and test pictures")
    everybody = [picture for site in sites.values() for picture in site.train]
    mixed = [everybody[i] for i in torch.randperm(len(everybody), generator=generator(config.seed, "batchnorm"))]
    work = {}
    for id, site in sites.items():
        anew = [recomputed(base, site.structure, states[id], pictures) for pictures in (mixed, site.train)]
        work[id] = _scores(site, (states[id], *anew))
    found = built.runtime.run(work)
    for outcome in found.values():
        if isinstance(outcome, Exception):
            raise outcome
    return found


async def _scores(site: Site, states: Sequence[State]) -> tuple[float, ...]:
    pictures = site.queries["test"]
    labels = labels_of(pictures)
    logits = [await site.logits(state, pictures) for state in states]
    return tuple(100 * float((own.argmax(-1) == labels).float().mean()) for own in logits)


def show(found: Mapping[str, tuple[float, ...]]) -> Table:
    table = Table("client", *COLUMNS, title="accuracy by whose BatchNorm statistics")
    for client, scores in found.items():
        table.add_row(client, *(f"{score:.1f}" for score in scores))
    table.add_section()
    table.add_row("mean", *(f"{fmean(column):.1f}" for column in zip(*found.values(), strict=True)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    given = parser.parse_args()
    with plain_errors(parser):
        found = accuracies(given.run)
        rows = [(client, *scores) for client, scores in found.items()]
        write_rows(given.run / "analysis" / "batchnorm.csv", ("client", *COLUMNS), rows)
        Console().print(show(found))


if __name__ == "__main__":
    main()
