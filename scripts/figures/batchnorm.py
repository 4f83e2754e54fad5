"""What averaging BatchNorm's statistics over clients costs: personal models scored as they are, with the statistics of
all clients' training pictures together, and with those of the client's own (as AdaBN, Li et al. 2017).

Nothing is trained: means and variances of a finished run's exported models are computed anew by forward passes, one
layer after the other being fed what the new statistics of the layers before make of the pictures; weights stay. Each
client's test pictures decide. Writes RUN/analysis/batchnorm.csv, and a table. With --round the models are those after
an earlier round, before any final step at the clients, from a checkpoint that the run kept
(`checkpoint.keep_rounds`), and the file is batchnorm-50.csv.

    python scripts/figures/batchnorm.py RUN
    python scripts/figures/batchnorm.py RUN --round 50
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from finished import whole
from rich.console import Console
from rich.table import Table
from torch.optim.swa_utils import update_bn

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench.build import Experiment
from llm_fed.eval.scripting import plain_errors, write_rows
from llm_fed.experiment.finish import personal_models
from llm_fed.federation.clients import Messages
from llm_fed.federation.progress import restore
from llm_fed.kinds.images import Images
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.scoring.scores import Summary
from llm_fed.state import State
from llm_fed.state.wire import WireError
from llm_fed.tasks.common import Picture, pixels_of

BATCH = 256  # pictures whose statistics are one term of the mean


def recomputed(base: Images, structure: Structure, state: State, pictures: Sequence[Picture]) -> State:
    """`state` with the statistics that the pictures have in it: means over equal parts of some BATCH pictures."""
    flat = base.flat(structure)
    flat.load(state)
    count = max(1, round(len(pictures) / BATCH))
    update_bn((base.prepare(pixels_of(pictures[nth::count])) for nth in range(count)), flat.module)
    return flat.read()


def after(built: Experiment, run: Path, round: int) -> dict[str, State]:
    """The personal models after a round of which the run has a checkpoint.

    Raises:
        UserError: it has none, or a damaged one.
    """
    try:
        saved = Checkpoints(run / "checkpoints").load(round)
    except WireError as error:
        raise UserError(f"{run}: {error}; give a round of checkpoint.keep_rounds") from error
    progress = restore(saved, built.clients, built.server)
    return personal_models(built, Messages(built.method, progress.state, built.scored), list(built.scored))


def accuracies(run: Path, round: int | None = None) -> dict[str, Summary]:
    """The clients' test scores by whose statistics their models have, at the end or after a round.

    Raises:
        UserError: the run is not finished, trained adapters, or has no test pictures at its clients or no BatchNorm;
            it has no checkpoint of the round.
    """
    built, base, states = whole(run)
    if round is not None:
        states = after(built, run, round)
    if not any(site.data.queries.get("test") for site in built.clients.values()):
        raise UserError(f"{run}: no client has test pictures; give a run whose clients are tested")
    if not any(state.extras for state in states.values()):
        raise UserError(f"{run}: the models have no BatchNorm, so there are no statistics to compute anew")
    everybody = [picture for site in built.clients.values() for picture in site.train]
    order = torch.randperm(len(everybody), generator=generator(built.config.seed, "batchnorm"))
    mixed = [everybody[i] for i in order]

    async def as_it_is(site: Site) -> State:
        return states[site.id]

    async def of_all_clients(site: Site) -> State:
        return recomputed(base, site.structure, states[site.id], mixed)

    async def of_its_own(site: Site) -> State:
        return recomputed(base, site.structure, states[site.id], site.train)

    summaries = {}
    for personal in (as_it_is, of_all_clients, of_its_own):
        summary = built.score(personal, "test")
        assert summary is not None  # some client has test pictures
        summaries[personal.__name__.replace("_", " ")] = summary
    return summaries


def show(summaries: Mapping[str, Summary]) -> Table:
    table = Table("client", *summaries, title="accuracy by whose BatchNorm statistics")
    for client in next(iter(summaries.values())).clients:
        table.add_row(client, *(f"{summary.clients[client]:.1f}" for summary in summaries.values()))
    table.add_section()
    table.add_row("mean", *(f"{summary.mean:.1f}" for summary in summaries.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--round", type=int, help="of a checkpoint that was kept (default: the exported models)")
    given = parser.parse_args()
    with plain_errors(parser):
        summaries = accuracies(given.run, given.round)
        columns = [summary.clients for summary in summaries.values()]
        rows = [(client, *(scores[client] for scores in columns)) for client in columns[0]]
        name = "batchnorm.csv" if given.round is None else f"batchnorm-{given.round}.csv"
        write_rows(given.run / "analysis" / name, ("client", *summaries), rows)
        Console(markup=False, emoji=False).print(show(summaries))


if __name__ == "__main__":
    with lasting_streams():
        main()
