"""What runs needed until their mean score reached a target: rounds, bytes and local computation (FedMoE, Figure 6).

The round is the first one whose score (eval.during's split, mean over the clients) is at or above the target; scores
are taken every eval.every rounds. Bytes are those that all clients together were sent and sent until then, from
metrics.jsonl. Floating point operations are those of all clients' work until then, a multiplication with an addition
counted as two, elementwise operations not at all: each client's whole work of one round - training, and what a method
asks of it besides - is done once more from the last checkpoint, and counted (torch's FlopCounterMode). It is the same
in every round but for methods that warm up. The server's own work is left out.

Writes target.csv and .png into the first RUN's folder analysis, and a table.

    python scripts/analysis/target.py --target 60 RUN [RUN ...]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from finished import told_apart
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from results import plain_errors, write_rows
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench import build
from llm_fed.eval.style import INK, PAGE, PALETTE, name_rows, plain_axes, save
from llm_fed.federation.clients import messages_for
from llm_fed.federation.progress import restore
from llm_fed.runs import extend
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.reading import read_config, scores_by_round
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter


@dataclass(frozen=True)
class Outcome:
    """When a run first reached the target, and what all its clients had needed by then; or how near it came."""

    reached: bool
    round: int  # where it was not reached: of the best score
    score: float  # 0-100, in that round
    bytes_up: int | None = None
    bytes_down: int | None = None
    flops: int | None = None


def search(run: Path, target: float) -> Outcome:
    """The first scored round at or above the target, or the best one without its costs.

    Raises:
        UserError: a run without scores of its rounds, or without checkpoints.
    """
    config, lines = read_config(run), read_records(run / "metrics.jsonl")
    curve = scores_by_round(run, config.eval.during)
    if not curve:
        raise UserError(f"{run} has no scores of its rounds; give runs with a {config.eval.during} split")
    good = [round for round, score in curve.items() if score >= target]
    if not good:
        best = max(curve, key=lambda round: curve[round])
        return Outcome(False, best, curve[best])
    until = [line for line in lines if line["round"] <= good[0]]
    up, down = (sum(line[key] for line in until if line["kind"] == "round") for key in ("bytes_up", "bytes_down"))
    asked = Counter(line["client"] for line in until if line["kind"] == "client")
    each = flops_of_a_round(run, asked)
    flops = sum(times * each[client] for client, times in asked.items())
    return Outcome(True, good[0], curve[good[0]], up, down, flops)


def flops_of_a_round(run: Path, clients: Collection[str]) -> dict[str, int]:
    """The floating point operations of each client's work in a round, counted while it is done; nothing is kept."""
    built = build.prepare(read_config(run), Reporter(Console(quiet=True)))
    folder = run / "checkpoints"
    saved = Checkpoints(folder).latest() if folder.is_dir() else None
    if saved is None:
        raise UserError(f"{run} has no checkpoint, from which a round's work is counted; give the whole run folder")
    progress = restore(saved, built.clients, built.server)
    messages = messages_for(built.method, progress.state, clients, built.config.transport.down)
    flops = {}
    for id in clients:
        site = built.clients[id]
        site.begin(progress.round, extend.lr(built.config, progress.round))
        with FlopCounterMode(display=False) as counter:
            (outcome,) = built.runtime.run({id: built.method.client_update(site, messages[id])}).values()
        if isinstance(outcome, Exception):
            raise outcome
        flops[id] = counter.get_total_flops()
    return flops


def draw(path: Path, outcomes: Mapping[str, Outcome], target: float) -> None:
    """A bar for each run and cost; a run that missed the target has none."""
    runs = list(outcomes.values())
    costs = {
        "rounds": ("", [run.round if run.reached else 0 for run in runs]),
        "bytes, up and down": ("B", [(run.bytes_up or 0) + (run.bytes_down or 0) for run in runs]),
        "local computation": ("FLOP", [run.flops or 0 for run in runs]),
    }
    figure = Figure(figsize=(7.2, 1.2 + 0.42 * len(runs)), layout="constrained", facecolor=PAGE[False])
    for place, (cost, (unit, values)) in enumerate(costs.items(), start=1):
        axes = plain_axes(figure, (1, 3, place))
        bars = axes.barh(range(len(runs)), values, 0.62, color=PALETTE[: len(runs)])
        form = EngFormatter(unit=unit, places=1 if unit else None)
        texts = [form(value) if run.reached else "not reached" for run, value in zip(runs, values, strict=True)]
        axes.bar_label(bars, texts, padding=3, color=INK[False], fontsize="small")
        axes.set(xlabel=cost, xlim=(0, 1.8 * max(1, *values)), xticks=[], ylim=(len(runs) - 0.5, -0.5), yticks=[])
        axes.grid(False)
    name_rows(figure.axes[0], range(len(runs)), list(outcomes))
    figure.suptitle(f"until the mean score is {target:g}", color=INK[False], fontsize="medium")
    save(figure, path)


def table(outcomes: Mapping[str, Outcome], target: float) -> Table:
    shown = Table("run", "round", "score", "bytes up", "bytes down", "local FLOP", title=f"until a mean of {target:g}")
    form = EngFormatter(places=3)
    for name, run in outcomes.items():
        costs = [form(cost) for cost in (run.bytes_up, run.bytes_down, run.flops) if cost is not None]
        shown.add_row(name, str(run.round), f"{run.score:.2f}", *(costs or ["not reached: the best"]))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--target", type=float, required=True, help="mean score to reach, 0-100")
    given = parser.parse_args()
    with plain_errors(parser):
        outcomes = {name: search(run, given.target) for name, run in told_apart(given.runs).items()}
        rows = [(name, *astuple(outcome)) for name, outcome in outcomes.items()]
        columns = ("run", *(field.name for field in fields(Outcome)))
        folder = write_rows(given.runs[0] / "analysis" / "target.csv", columns, rows)
        draw(folder / "target.png", outcomes, given.target)
    Console(markup=False, emoji=False).print(table(outcomes, given.target))


if __name__ == "__main__":
    with lasting_streams():
        main()
