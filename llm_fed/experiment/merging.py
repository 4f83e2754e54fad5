"""Runs merges: trains or finds the two parents, and gives each client its two models to merge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_fed import methods
from llm_fed.basics import documents, signs
from llm_fed.basics.errors import RunError, one_line
from llm_fed.bench.build import Experiment
from llm_fed.bench.parents import config_of, states_of_run
from llm_fed.eval import merges
from llm_fed.experiment.baselines import Baselines
from llm_fed.experiment.finish import deliver
from llm_fed.experiment.splits import log_reading
from llm_fed.export import models
from llm_fed.export.card import model_card
from llm_fed.kinds import Kind
from llm_fed.method import Parent
from llm_fed.method.requests import succeeded
from llm_fed.models.prompt import Prompt
from llm_fed.models.structure import Structure
from llm_fed.runs.folder import Run, log_event
from llm_fed.runs.records import read_object, read_records, time_of_day
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict
from llm_fed.state import State

Train = Callable[[Config, Path], dict[str, Any]]  # the run in a folder, to its end; its summary


def trained(
    experiment: Experiment, run: Run, train: Train, reporter: Reporter, locations: Mapping[str, Path]
) -> Iterator[tuple[Parent, Config, Path, int]]:
    """Each parent of a merge after its end: with its configuration, its folder and the round whose models are merged.
    `indices`: by the name of a parent its folder, where that is not `needs/<name>` in the run's own."""
    config = experiment.config
    for parent in experiment.method.parents:
        folder = locations.get(parent.name, run.folder / "needs" / parent.name)
        its_config = config_of(parent.name, config)
        reporter.note(f"{config.method['name']} starts from {parent.name}: {folder}")
        summary = train(its_config, folder)
        if parent.round is not None and summary.get("ended", {"round": parent.round})["round"] < parent.round:
            raise RunError(
                f"{config.method['name']} merges round {parent.round} of {parent.name}, which has ended after round "
                f"{summary['ended']['round']} ({summary['ended']['why']}); --continue trains it further"
            )
        yield parent, its_config, folder, summary["round"] if parent.round is None else parent.round


def ended_in(folders: Mapping[str, Path]) -> dict[str, Any]:
    """What the summary of a merge says of parents that have ended before their last round: of the longest of them.
    `folders`: of the parents, by name."""
    found = [(name, read_object(folder / "summary.json").get("ended")) for name, folder in folders.items()]
    ended = [{"round": how["round"], "why": f"{how['why']} (in the run of {name})"} for name, how in found if how]
    return {"ended": max(ended, key=lambda how: how["round"])} if ended else {}


def merge_runs(
    experiment: Experiment,
    run: Run,
    train: Train,
    reporter: Reporter,
    baselines: Baselines,
    locations: Mapping[str, Path],
) -> dict[str, Any]:
    """The whole run of a merge; the content of its summary. See `trained`."""
    config, method = experiment.config, experiment.method
    rounds, given, seen, folders = {}, {}, set(), {}
    for parent, its_config, folder, chosen in trained(experiment, run, train, reporter, locations):
        rounds[parent.name], folders[parent.name] = chosen, folder
        given[parent.name] = states_of_run(
            folder, parent.round, its_config, experiment.base, experiment.clients, experiment.runtime
        )
        seen |= models.seen(read_records(folder / "metrics.jsonl"), chosen)
    run.rewind()
    run.lap()  # the parents have folders of their own
    log_reading(run, experiment)
    for words in run.changes:
        log_event(run, config.rounds, "", "data changed", words)
    began, facts = time.perf_counter(), {"needs": rounds, **ended_in(folders)}
    with signs.part("merging at the clients"):
        merge(experiment, given, facts["ended"]["round"] if "ended" in facts else None)
    seconds = round(time.perf_counter() - began, 4)
    run.log_timing({"round": config.rounds, "seconds": seconds, "parts": {"merge": seconds}, "ended": time_of_day()})
    run.lap()
    for id, site in experiment.clients.items():
        recipe = method.recipe(site)
        run.log({"kind": "merge", "client": id, "rounds": rounds, **recipe})
        if "note" in recipe:
            reporter.note(f"{id}: {recipe['note']}")
    messages = dict.fromkeys(experiment.clients)
    return deliver(experiment, run, messages, config.rounds, seen, baselines, "the merge", **facts)


def log_recipe(run: Run, round: int, client: str, read: Callable[[], Any], rounds: Mapping[str, int]) -> None:
    """The line of a recipe that came from another machine, unless reports and tables could not show it."""
    try:
        recipe = read()
        merges.tabulate({client: recipe})
        merges.curves({client: recipe})
    except Exception as error:  # of any kind: whatever one client answers ends that answer alone
        log_event(run, round, client, "refused recipe", one_line(f"{type(error).__name__}: {error}"))
    else:
        run.log({**recipe, "kind": "merge", "client": client, "rounds": rounds})


def merge(experiment: Experiment, given: Mapping[str, Mapping[str, State]], last: int | None = None) -> None:
    """Merge at every client what it is `given` (by parent and client). UserError, RunError: a client cannot be merged.
    `last`: the round after which the run ends, from which random choices follow (default: that of the
    configuration)."""
    work = {}
    for id, site in experiment.clients.items():
        site.begin((last or experiment.config.rounds) + 1, experiment.config.local.lr)
        work[id] = experiment.method.finish(site, {parent: states[id] for parent, states in given.items()})
    succeeded(experiment.runtime.run(work))


def write_adapter(
    folder: Path, config: Config, base: Kind, client: str, model: tuple[State, Structure], labels: int,
    recipe: Mapping[str, Any], prompt: Prompt | None,
) -> None:  # fmt: skip
    """Write an adapter that was merged outside of a run, with its card. `labels`: how many a classifier tells apart."""
    state, structure = model
    card = model_card(
        models.described(structure, base, labels, prompt), client=client, method=config.method["name"],
        paper=methods.build(config.method).paper, metrics={}, config=documents.dump(as_dict(config)), recipe=recipe,
    )  # fmt: skip
    models.write(folder, state, structure, base, card, prompt)
