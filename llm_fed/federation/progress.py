"""Progress: where a run stands after a round, and how a checkpoint holds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError
from llm_fed.method import Method
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.runs.checkpoint import Saved, rounds_in
from llm_fed.runs.folder import log_event
from llm_fed.runs.records import comparable, digest
from llm_fed.runs.rows import Memory, StoredRow
from llm_fed.state.roles import Given
from llm_fed.state.wire import Message

if TYPE_CHECKING:
    from llm_fed.runs.folder import Run
    from llm_fed.settings.config import Config, StopConfig

UNSCORED = (
    "stop.patience={} waits for scores of validation examples, but nobody has any; set task.validation=0.1, or leave "
    "stop.patience out"
)


@dataclass(frozen=True)
class InFlight:
    """An upload on its way to the server."""

    client: str
    requested: int  # the round in which the client was asked
    arrival: int  # the round in which the server receives it
    num_examples: int
    content: StoredRow
    given: Given  # what the upload must be like


@dataclass(frozen=True)
class Best:
    """The round with the best score so far."""

    round: int = 0  # 0: none yet
    score: float = -math.inf
    loss: float = math.inf  # infinite where it is not known


@dataclass(frozen=True)
class Ended:
    """That a run has ended before its last round: after which one, and why."""

    round: int
    why: str


@dataclass
class Progress:
    """Where a run stands after a round; this is what a checkpoint holds."""

    state: Message
    round: int = 0
    in_flight: list[InFlight] = field(default_factory=list)
    best: Best = Best()
    elsewhere: Message = None  # of clients whose memories are not in this process: what is known of these
    requested: set[str] = field(default_factory=set)  # since the first round; nobody else remembers anything
    ended: Ended | None = None  # where the run has ended before its last round; no checkpoint holds it

    def send(self, item: InFlight, run: Run, facts: Mapping[str, Json]) -> None:
        """Put an answer on its way, and log its client's line with these facts."""
        self.in_flight.append(item)
        late = item.arrival - item.requested
        run.log({"kind": "client", "round": item.requested, "client": item.client, **facts, "staleness": late})

    def consider(self, line: Mapping[str, Any], config: Config) -> bool:
        """Take in a line of scores; whether they are the best so far of those among which the best is sought. Of equal
        scores the one with the lower loss is better, and of equal losses the later one."""
        settings, round = config.eval, line["round"]
        to_come = math.ceil((config.rounds - round) / settings.every) if settings.every else 0
        too_early = settings.of_last is not None and to_come >= settings.of_last
        loss = math.inf if line.get("loss") is None else line["loss"]
        if too_early or (line["mean"], -loss) < (self.best.score, -self.best.loss):
            return False
        self.best = Best(round, line["mean"], loss)
        return True

    def search_anew(self, lines: Sequence[Mapping[str, Any]], config: Config) -> None:
        """Forget the best round, and seek it among these lines of scores."""
        self.best = Best()
        for line in lines:
            self.consider(line, config)


def resume(run: Run, method: Method, clients: Mapping[str, Site], server: Server) -> Progress:
    """The progress of the run's newest checkpoint, or of a run that begins; the sites have their memories. Where other
    rows are scored now, the search for the best round starts again."""
    saved = run.checkpoints.latest() if run.continues else None  # else nothing lies there
    if run.continues:
        run.rewind(saved.state if saved else None)
    if saved is None:
        for site in (*clients.values(), server):
            site.memory = Memory(run.checkpoints.store)
        return Progress(method.init(server))
    for words in run.changes[saved.state.get("data_changes", 0) :]:
        log_event(run, saved.round, "", "data changed", words)
    progress, rows = restore(saved, clients, server), [saved.state["scored_rows"], run.scored_rows]
    if rows[0] != rows[1]:
        progress.search_anew([], run.config)
        run.log({"kind": "search anew", "round": progress.round, "changed": {"rows": rows}})
    return progress


def end_early(run: Run, progress: Progress, why: str) -> None:
    """Take down that the run ends here. `eval.of_last` then counts back from this round, as in a run of so many rounds;
    only rounds that have a checkpoint count."""
    progress.ended = Ended(progress.round, why)
    if run.config.eval.of_last is not None:
        kept = rounds_in(run.checkpoints.folder)
        lines = [line for line in scores(run) if line["round"] in kept]
        progress.search_anew(lines, replace(run.config, rounds=progress.round))


def scores(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with scores among which the best round is sought."""
    split, lines = run.config.eval.during, comparable(run.records())
    return [line for line in lines if line["kind"] == "score" and line["split"] == split and line["round"]]


def save(run: Run, progress: Progress, clients: Mapping[str, Site], server: Server) -> None:
    """Write the checkpoint of `progress.round`, then delete those that are no longer kept."""
    sites = {f"memory/{name}": clients[name] for name in sorted(progress.requested & clients.keys())}
    held = {key: cast(Memory, site.memory).rows for key, site in {**sites, "server": server}.items()}  # since `resume`
    rows: dict[str, StoredRow | Mapping[str, StoredRow]] = {key: kept for key, kept in held.items() if kept}
    flying = []
    for item in progress.in_flight:
        key = f"flight/{item.requested}/{item.client}"
        rows[key] = item.content
        flying.append([key, item.client, item.requested, item.arrival, item.num_examples, item.given.message()])
    state = {
        "state": progress.state,
        "best_round": progress.best.round,
        "best_score": progress.best.score,
        "best_loss": progress.best.loss,
        "in_flight": flying,
        "elsewhere": progress.elsewhere,
        "metrics": run.mark(),
        "digests": run.digests.mark(),
        "metrics_sha256": digest(run.metrics_file),
        "scored_rows": run.scored_rows,
        "data_changes": len(run.changes),
    }
    run.checkpoints.save(progress.round, state, rows)
    prune(run, progress)


def prune(run: Run, progress: Progress) -> None:
    """Delete the checkpoints that are no longer kept; of later rounds than `progress` there are only damaged ones."""
    settings = run.config.checkpoint
    newest = [round for round in rounds_in(run.checkpoints.folder) if round <= progress.round][-settings.keep :]
    kept = {*newest, *settings.keep_rounds, progress.best.round}
    run.checkpoints.prune(lambda round: round in kept or round > progress.round)


def restore(saved: Saved, clients: Mapping[str, Site], server: Server | None = None) -> Progress:
    """Put what a checkpoint holds back: the memories of the clients and the server, and the rest as it is returned."""
    for name, site in clients.items():
        site.memory = saved.memory(f"memory/{name}")
    if server is not None:
        server.memory = saved.memory("server")
    held, flying = saved.state, []
    for key, client, requested, arrival, examples, given in held["in_flight"]:
        if not isinstance(content := saved.rows.get(key), StoredRow):
            raise RunError(
                f"the checkpoint of round {saved.round} has no answer {key}: it is damaged. Start again with --fresh."
            )
        flying.append(InFlight(client, requested, arrival, examples, content, Given(**given)))
    best = Best(held["best_round"], held["best_score"], held["best_loss"])
    requested = {name for name in clients if f"memory/{name}" in saved.rows}  # the others that were asked kept nothing
    return Progress(held["state"], saved.round, flying, best, held.get("elsewhere"), requested)


def memories(clients: Mapping[str, Site], server: Server, requested: Iterable[str]) -> dict[str, Memory]:
    """By name what clients that were asked, and the server, remember, in this process."""
    sites = [(id, clients[id]) for id in requested if id in clients] + [("server", server)]
    return {id: site.memory for id, site in sites if isinstance(site.memory, Memory) and site.memory}


def stop_reason(lines: Sequence[Mapping[str, float]], stop: StopConfig, since: int = 0) -> str:
    """Why a run ends after the last of these scored rounds; empty where it goes on.

    It follows from the scores alone, which metrics.jsonl holds up to the newest checkpoint, so a run that is killed and
    continued ends after the same round as one that was never interrupted. As in early stopping of other libraries, only
    a value that differs by more than `stop.min_delta` from the best one so far becomes the best one. `lines`: of
    scores, in the order of their rounds. `since`: a round from which the user let the run go on; only scored rounds
    after it are counted.
    """
    if stop.patience is None:
        return ""
    best, round, waited = -math.inf, 0.0, 0
    for line in lines:
        value = line["mean"]
        if value > best + stop.min_delta or not round:
            best, round, waited = value, line["round"], 0
        elif line["round"] > since:
            waited += 1
    if waited < stop.patience:
        return ""
    than = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
    return (
        f"stop.patience={stop.patience}: the validation score of round {round:g} was not improved upon{than} in "
        f"{waited} scored round{'' if waited == 1 else 's'}"
    )
