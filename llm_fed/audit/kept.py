"""What a run folder holds, compared with the chain of digests; nothing is computed but what clients are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llm_fed.audit.findings import Audit, words
from llm_fed.runs import digests
from llm_fed.runs.checkpoint import Checkpoints, Saved
from llm_fed.runs.records import read_object, read_records
from llm_fed.runs.rows import StoredRow
from llm_fed.settings.config import Config
from llm_fed.state.wire import WireError, pack


def summary(folder: Path, report: Audit) -> None:
    """The test scores in summary.json are those of metrics.jsonl."""
    try:
        held = read_object(folder / "summary.json")
    except OSError:
        return
    except (ValueError, RecursionError) as error:
        return report.find(0, "", "scores", f"summary.json is damaged: {error}")
    tested = [line for line in read_records(folder / "metrics.jsonl") if line.get("split") == "test" and line["round"]]
    if "clients" in held["scores"] and tested[-1:] != [held["scores"]]:
        report.find(held["round"], "", "scores", "the test scores in summary.json are not those of metrics.jsonl")


def skipped(folder: Path, config: Config, chain: digests.Chain, report: Audit) -> None:
    """Rounds that were to be scored and were not, where others were, since scores were last made in another way."""
    lines = read_records(folder / "metrics.jsonl")
    since = max((line["round"] for line in lines if line["kind"] == "search anew"), default=0)
    scored = {line["round"] for line in lines if line["kind"] == "score" and line["split"] == config.eval.during} - {0}
    last = config.rounds if (folder / "summary.json").exists() else 0  # of a finished run it always is
    for round, line in chain.rounds.items() if scored else ():
        if (line["due"] or round == last) and round not in scored and round > since:
            report.find(round, "", "scores", f"the {config.eval.during} scores of this round are missing")


def checkpoints(folder: Path, chain: digests.Chain, report: Audit) -> dict[int, Saved]:
    """The checkpoints that are whole and as the chain says, by round."""
    held, good = Checkpoints(folder / "checkpoints"), {}
    for round in held.rounds():
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
    round = saved.round
    if round not in chain.states:
        return
    if digests.of_message(saved.state["state"]) != chain.states[round]:
        report.find(round, "server", "checkpoint", "the server's state is not the one that the run had")
    for key, client, asked, *_ in saved.state["in_flight"]:
        row = saved.rows[key]
        known = chain.rounds.get(asked, {}).get("uploads", {}).get(client)
        if isinstance(row, StoredRow) and known not in (None, row.digest):
            report.find(round, client, "checkpoint", f"its upload of round {asked} is not the one that arrived")
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
    broadcast: Callable[[Any, str], Any],
    config: Config,
    report: Audit,
    *,
    same_bits: bool,
) -> None:
    """Who was asked in the round after a kept checkpoint was sent what follows from it.

    Args:
        broadcast: that of the method.
        same_bits: whether this machine computes as the run's did. Elsewhere a message that differs may be rounding.
    """
    same, differ = set(), set()
    for round, saved in kept.items():
        for client, known in chain.rounds.get(round + 1, {"sent": {}})["sent"].items():
            sent = pack(broadcast(saved.state["state"], client), config.transport.down)
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


def exports(folder: Path, chain: digests.Chain, report: Audit) -> None:
    """The exported weights are those that the run has written."""
    if chain.end is None:
        return
    now, then = digests.of_files(folder), chain.end["adapters"]
    for name in sorted({*now, *then}):
        if now.get(name) != then.get(name):
            report.find(chain.end["round"], Path(name).parts[1], "export", f"{name} is not what the run wrote")
    report.checked.append(f"{len(now)} exported files")
