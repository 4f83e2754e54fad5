"""A run's models after any round that it has kept: what it would have exported had it ended there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from llm_fed import methods
from llm_fed.basics import checksum, signs
from llm_fed.basics.errors import RunError, UserError, require
from llm_fed.basics.files import read_file, write_file, write_folders
from llm_fed.bench.build import Experiment, prepare
from llm_fed.experiment import splits
from llm_fed.experiment.finish import contents, spent_of
from llm_fed.export import models
from llm_fed.federation.clients import Messages, run_each
from llm_fed.federation.progress import Progress, restore
from llm_fed.method import Method
from llm_fed.method.requests import succeeded
from llm_fed.runs.checkpoint import BEST, Checkpoints, DamagedCheckpoint, Place, Saved, check_kept, rounds_in
from llm_fed.runs.folder import ENDED, SPLITS
from llm_fed.runs.reading import read_config, saved_summary
from llm_fed.runs.records import comparable, read_records, recall
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import Config
from llm_fed.state import State

LATEST = "latest"  # the newest round that a run has kept
_TRIES = 5  # to read a checkpoint beside a process that replaces it by a newer one
At = int | str


@dataclass(frozen=True)
class RoundModels:
    """The models of a run after a round."""

    experiment: Experiment  # of the run's configuration; its sites are as they are after the round
    round: int
    states: Mapping[str, State]  # by client (or the server, where it is tested) its personal model


@contextmanager
def opened(
    named: str | Path, clients: Sequence[str] = (), *, everybody: bool = False, latest: bool = False
) -> Iterator[Path]:
    """A folder with the personal models of a run, or of a round of it. That of a round is a folder for the moment, and
    looks like that of a run which ended there; the run's own is not changed, and may be written to meanwhile.
    UserError: the folder is no run, or the round is not there. RunError: its checkpoint is damaged, or a client could
    not finish.

    Args:
        named: RUN, RUN@ROUND or RUN@best.
        clients: whose models are wanted; otherwise those that the run exports.
        everybody: whether the models of all clients are wanted, whatever `export.clients` says.
        latest: whether of a run that is not finished the models of its newest checkpoint are meant.
    """
    location = Place.parse(named)
    folder, reporter = location.folder, Reporter()
    at: At | None = location.round
    if at is None and latest and (folder / "config.yaml").is_file() and saved_summary(folder) is None:
        at = LATEST
    if at is None:
        yield folder
        return
    with TemporaryDirectory() as scratch:
        found = models_at(folder, at, reporter)
        view = Path(scratch) / f"{folder.resolve().name}@{found.round}"
        _write(found, folder, view, clients, everybody)
        which = {BEST: ", the best one on validation", LATEST: ", the newest that it has kept"}.get(str(at), "")
        reporter.note(f"{folder}: the models of round {found.round} of {found.experiment.config.rounds}{which}")
        del found  # the base with it, before it is loaded for its use
        try:
            yield view
        except (RunError, UserError) as error:  # nobody else knows that folder
            error.args = (str(error).replace(str(view), str(named)),)
            raise


def models_at(folder: Path, at: At, reporter: Reporter | None = None) -> RoundModels:
    """The models after a round, with the own steps that follow the last round of a run. UserError, RunError: see
    `opened`. `at`: the number of the round, `BEST` or `LATEST`."""
    config, reporter = read_config(folder), reporter or Reporter()
    if (folder / "network.json").is_file():
        raise UserError(f"{folder} is a run over a network, so its personal models are on the clients' machines")
    _round(folder, config, at)  # before anything is loaded
    experiment = prepare(config, Reporter(Console(quiet=True)), known=splits.known(folder, config).all)
    with signs.part("the models of a round"):
        saved = _saved(folder, config, at)
        progress = restore(saved, experiment.clients, experiment.server)
        _finish(experiment, progress, reporter)
        messages = Messages(experiment.method, progress.state, experiment.scored, config.transport)
        work = {id: experiment.method.personalize(site, messages[id]) for id, site in experiment.scored.items()}
        return RoundModels(experiment, saved.round, succeeded(experiment.runtime.run(work)))


def _round(folder: Path, config: Config, at: At) -> int:
    """The number of a round that the run has kept. UserError: it has none such."""
    if methods.build(config.method).parents:
        raise UserError(
            f"{folder} is a merge, which has no rounds of its own; llm-fed merge {config.method['name']} merges those "
            f"of two runs, such as {folder}/needs/NAME, each RUN@ROUND"
        )
    if isinstance(at, int):
        check_kept(folder, at)
        return at
    if not (kept := rounds_in(folder / "checkpoints")):
        done, wait = f"give {folder}, which holds what it exported", "wait for its first round, or continue it"
        raise UserError(f"{folder} has no checkpoint of any round; {done if saved_summary(folder) else wait}")
    return best_round(folder, config, kept[-1]) if at == BEST else kept[-1]


def best_round(folder: Path, config: Config, newest: int) -> int:
    """The round that is best on validation among those up to the newest checkpoint. UserError: no validation example
    was scored."""
    ended = recall(folder / ENDED)
    lines = [
        line
        for line in comparable(read_records(folder / "metrics.jsonl"))
        if (line["kind"], line.get("split")) == ("score", "validation") and 0 < line["round"] <= newest
    ]
    if not lines or config.eval.during != "validation":
        raise UserError(
            f"{folder}@{BEST} is the round that is best on validation, but no validation example was scored in its "
            f"rounds; give {folder}@ROUND, or train with eval.during=validation and task.validation=0.1"
        )
    sought = Progress(None)
    if ended and config.eval.of_last is not None:
        config = replace(config, rounds=ended["round"])
        lines = [line for line in lines if line["round"] in rounds_in(folder / "checkpoints")]
    sought.search_anew(lines, config)
    return sought.best.round or newest


def _saved(folder: Path, config: Config, at: At) -> Saved:
    """A checkpoint; another process may write new ones and delete old ones meanwhile."""
    for _ in range(_TRIES):
        round = _round(folder, config, at)
        try:
            return Checkpoints(folder / "checkpoints", beside=True).load(round)
        except DamagedCheckpoint:
            if round in rounds_in(folder / "checkpoints"):
                raise
    check_kept(folder, round)
    raise AssertionError  # check_kept has said that the round is not there


def _finish(experiment: Experiment, progress: Progress, reporter: Reporter) -> None:
    """`Method.finish` at every client, as where the run ends with this round."""
    method, config = experiment.method, experiment.config
    if type(method).finish is Method.finish:
        return
    if config.privacy.by_example:
        raise UserError(
            f"with privacy.unit=example, {config.method['name']}'s own steps after round {progress.round} would spend "
            "more of the clients' privacy than the run has said; only the models that it exported are there"
        )
    for site in experiment.trainers.values():
        site.rounds = progress.round
        site.begin(progress.round + 1, config.local.lr)
    messages = Messages(method, progress.state, experiment.trainers, config.transport)
    work = {id: method.finish(site, messages[id]) for id, site in experiment.trainers.items()}
    with signs.part(signs.FINISHING):
        outcomes = run_each(experiment.trainers, work, experiment.runtime)
    for id, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            reporter.note(f"{id}: it could not finish, and goes without: {outcome}")


def _write(found: RoundModels, folder: Path, view: Path, clients: Collection[str], everybody: bool) -> None:
    """A folder like that of a run which ended with this round and has tested nothing."""
    experiment, config = found.experiment, found.experiment.config
    records = [line for line in read_records(folder / "metrics.jsonl") if line.get("round", 0) <= found.round]
    chosen = [require("--client", client, found.states) for client in clients] or [*found.states]
    if not (clients or everybody) and config.export.clients == "seen":
        chosen = [id for id in chosen if id in models.seen(records, found.round)] or chosen
    elif not (clients or everybody) and not isinstance(config.export.clients, str):
        chosen = models.chosen(config.export.clients, chosen, ())
    text = read_file(folder / "config.yaml").decode()
    sites = (experiment.scored[id] for id in chosen)
    files = contents(experiment, sites, found.states, {}, checksum.uncommented(text), spent_of(records))
    write_folders(((view / "adapters" / id, own) for id, own in files), "a personal model")
    write_file(view / "config.yaml", text.encode())
    if (folder / SPLITS).is_file():
        shutil.copyfile(folder / SPLITS, view / SPLITS)
    done = saved_summary(folder) or {}
    summary = {
        "round": found.round, "rounds": config.rounds, "method": config.method["name"],
        "scores": {"kind": "score", "round": found.round, "split": "test"},
        **({"base": done["base"]} if "base" in done else {}),
    }  # fmt: skip
    write_file(view / "summary.json", json.dumps(checksum.added(summary), ensure_ascii=False).encode())
