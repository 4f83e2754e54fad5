"""What a run folder holds, compared with the chain of digests; nothing is computed but what clients are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from llm_fed.audit.findings import Audit, Finding, words
from llm_fed.basics.errors import RunError, one_line
from llm_fed.federation.progress import stop_reason
from llm_fed.runs import digests, extend
from llm_fed.runs.checkpoint import Checkpoints, Saved, rounds_in
from llm_fed.runs.folder import CONTINUED, ENDED
from llm_fed.runs.reading import is_finished
from llm_fed.runs.records import comparable, read_object, read_records, recall
from llm_fed.runs.rows import StoredRow
from llm_fed.settings.config import Config
from llm_fed.state.wire import Message, WireError, pack


def delivered(folder: Path) -> dict[str, str] | None:
    """The digests of what a finished run hands out; None where there are none, or they are damaged."""
    if not is_finished(folder) or not (folder / digests.DELIVERED).exists():
        return None
    try:
        return dict(read_object(folder / digests.DELIVERED)["files"])
    except (OSError, ValueError):
        return None


def files(folder: Path, chain: digests.Chain, report: Audit) -> None:
    """All that the run hands out is what it was when the run took its digests down."""
    end, known = chain.end or {"round": 0, "adapters": {}}, delivered(folder)
    if known is None and is_finished(folder) and (folder / digests.DELIVERED).exists():
        report.findings.append(Finding(0, "", "file", f"{digests.DELIVERED} is damaged"))
    then = {**(known or {}), **end["adapters"]}
    now = digests.of_files(folder) if known is None else digests.delivered(folder)
    for name in sorted({*now, *then}):
        if name not in now:
            report.unchecked.append(f"{name}: it is missing")
        elif name not in then:
            report.unchecked.append(f"{name}: the run has not written it")
        elif now[name] != then[name] and name in end["adapters"]:
            report.find(end["round"], Path(name).parts[1], "export", f"{name} is not what the run wrote")
        elif now[name] != then[name]:
            report.findings.append(Finding(0, "", "file", f"{name} is not what the run wrote"))
    if known is None and chain.lines:
        why = f"their digests are in {digests.DELIVERED}, which the end of a run writes"
        report.unchecked.append(f"files beside {digests.FILE}, metrics.jsonl and exported weights: {why}")
    if then:
        report.checked.append(f"{len(then)} files that the run hands out")


def summary(folder: Path, config: Config, report: Audit) -> None:
    """The test scores in summary.json are those of metrics.jsonl, and its method is that of config.yaml."""
    try:
        held = read_object(folder / "summary.json")
    except OSError:
        return
    except (ValueError, RecursionError) as error:
        return report.find(0, "", "scores", f"summary.json is damaged: {error}")
    if held["method"] != (name := config.method["name"]):
        report.find(0, "", "scores", f"they are of the method {held['method']:.60}, and config.yaml says {name}")
    tested = [line for line in read_records(folder / "metrics.jsonl") if line.get("split") == "test" and line["round"]]
    if "clients" in held["scores"] and tested[-1:] != [held["scores"]]:
        report.find(held["round"], "", "scores", "the test scores in summary.json are not those of metrics.jsonl")


def skipped(folder: Path, config: Config, chain: digests.Chain, last: int, report: Audit) -> None:
    """Rounds that were to be scored and were not, where others were, since scores were last made in another way;
    `last`, of a finished run, always is."""
    if missing := {*range(min(chain.rounds, default=1), last + 1)} - chain.rounds.keys() if chain.lines else ():
        report.unchecked.append(f"rounds {words(missing)}: {digests.FILE} has no line of them")
    lines = read_records(folder / "metrics.jsonl")
    since = max((line["round"] for line in lines if line["kind"] == "search anew"), default=0)
    scored = {line["round"] for line in lines if line["kind"] == "score" and line["split"] == config.eval.during} - {0}
    for round, line in chain.rounds.items() if scored else ():
        if (line["due"] or round == last) and round not in scored and round > since:
            report.find(round, "", "scores", f"the {config.eval.during} scores of this round are missing")


def ended(folder: Path, config: Config, report: Audit) -> int:
    """The last round of a run; 0: it is not finished. Where a stop rule has ended it, its scores say so; where the rule
    would have ended it before, that is said."""
    if not is_finished(folder):
        return 0
    try:
        held, own, continued = (recall(folder / name) for name in ("summary.json", ENDED, CONTINUED))
    except RunError as error:
        report.find(0, "", "scores", f"how the run has ended cannot be read: {error}")
        return 0
    assert held is not None  # of a finished run
    since = continued["round"] if continued else 0
    if held.get("ended") != own:
        report.find(held["round"], "", "scores", f"summary.json and {ENDED} disagree on how the run has ended")
    last = own["round"] if own else config.rounds
    if "needs" not in held:
        _rule(folder, config, own, since, report)
    return int(last)


def _rule(folder: Path, config: Config, own: extend.Ended, since: int, report: Audit) -> None:
    if config.stop.patience is None:
        return
    last, split = own["round"] if own else config.rounds, config.eval.during
    lines = comparable(read_records(folder / "metrics.jsonl"))
    scored = [
        line for line in lines if line["kind"] == "score" and line["split"] == split and 0 < line["round"] <= last
    ]
    if own and extend.by_rule(own) and stop_reason(scored, config.stop, since) != own["why"]:
        what = f"the run has ended after round {last} by its stop rule, which does not follow from its scores"
        return report.find(last, "", "scores", what)
    for number, line in enumerate(scored, 1):
        due = config.eval.every and line["round"] % config.eval.every == 0
        if due and since < line["round"] < last and stop_reason(scored[:number], config.stop, since):
            why = f"the stop rule would have ended the run after round {line['round']}, unless it was another one then"
            return report.unchecked.append(why)


def checkpoints(folder: Path, chain: digests.Chain, report: Audit) -> dict[int, Saved]:
    """The checkpoints that are whole and as the chain says, by round."""
    held, good = Checkpoints(folder / "checkpoints"), {}
    for round in rounds_in(held.folder):
        before = len(report.findings)
        try:
            saved = held.load(round)
        except WireError as error:
            report.find(round, "", "checkpoint", str(error))
            continue
        if not chain.lines and saved.state.get("digests"):
            report.find(round, "", "chain", f"{digests.FILE} was there when this checkpoint was written, and is gone")
        _compare(saved, chain, report)
        if len(report.findings) == before:
            good[round] = saved
    report.checked.append(f"the checkpoints of rounds {words(good)}")
    return good


def _compare(saved: Saved, chain: digests.Chain, report: Audit) -> None:
    """The server's state, uploads on their way, and memories of a checkpoint."""
    if (round := saved.round) not in chain.states:
        return
    if digests.digest(pack(saved.state["state"])) != chain.states[round]:
        report.find(round, "server", "checkpoint", "the server's state is not the one that the run had")
    for key, client, requested, *_ in saved.state["in_flight"]:
        row = saved.rows[key]
        known = chain.rounds.get(requested, {}).get("uploads", {}).get(client)
        if isinstance(row, StoredRow) and known not in (None, row.digest):
            report.find(round, client, "checkpoint", f"its upload of round {requested} is not the one that arrived")
    remembered: dict[str, str] = {}
    for line in (line for line in chain.lines if line["kind"] == "round" and line["round"] <= round):
        remembered |= line["memory"]
    for client, known in remembered.items():
        key = "server" if client == "server" else f"memory/{client}"
        if digests.of_memory(saved.memory(key)) != known:
            report.find(round, client, "checkpoint", "its memory is not what it was then")


def messages(
    kept: Mapping[int, Saved],
    chain: digests.Chain,
    broadcast: Callable[[Message, str], Message],
    config: Config,
    report: Audit,
    *,
    same_bits: bool,
) -> None:
    """Who was asked in the round after a kept checkpoint was sent what follows from it; without `same_bits`, where this
    machine does not compute as the run's did, a difference may be rounding."""
    same, differ = set(), set()
    for round, saved in kept.items():
        for client, known in chain.rounds.get(round + 1, {"sent": {}})["sent"].items():
            try:
                sent = pack(broadcast(saved.state["state"], client), config.transport)
            except Exception as error:  # a method may rely on what only its own states have
                name, why = config.method["name"], f"{type(error).__name__}: {one_line(str(error))}"
                report.find(round + 1, client, "message", f"{name} cannot send the state of round {round} ({why})")
                continue
            if digests.digest(sent) == known:
                same.add(round + 1)
            elif same_bits:
                report.find(round + 1, client, "message", f"was not sent what follows from the state of round {round}")
            else:
                differ.add(round + 1)
    if differ:
        report.unchecked.append(
            f"what clients were sent in rounds {words(differ)}: this machine computes something else from the "
            "checkpoint before, which may be due to rounding"
        )
    if same - differ:
        report.checked.append(f"what clients were sent in rounds {words(same - differ)}, computed from checkpoints")
