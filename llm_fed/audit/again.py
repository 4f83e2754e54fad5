"""Trains rounds of a run again where this machine computes as the run's did, and compares all digests and scores."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llm_fed.audit.findings import Audit, words
from llm_fed.audit.kept import delivered
from llm_fed.audit.replay import Replay, Round
from llm_fed.export import models
from llm_fed.export.peft_folders import CARD
from llm_fed.runs import digests
from llm_fed.runs.checkpoint import Saved
from llm_fed.runs.reading import is_finished
from llm_fed.runs.records import comparable, read_object


def compare(
    replay: Replay,
    folder: Path,
    chain: digests.Chain,
    kept: Mapping[int, Saved],
    wanted: Collection[int],
    since: int,
    report: Audit,
) -> None:
    """Train the wanted rounds again, each from the nearest state before it that is known, and the end of the run.

    Args:
        kept: whole checkpoints, by round.
        wanted: rounds that the chain has, in their order.
        since: the last round that was trained on other data than there are now; 0: none.
    """
    checked: list[int] = []
    broken = since  # the last round that differs: what follows from it is known again from the next checkpoint on
    at: int | None = None  # the round whose end the replay stands at; None: it has gone another way than the run
    for target in (round for round in wanted if round > since):
        while broken < target and (at is None or at < target):
            starts = [round for round in kept if broken <= round < target] or ([] if broken else [0])
            if at is None and not starts:
                why = "differs" if broken > since else "was trained on other data"
                report.unchecked.append(
                    f"round {target}: it depends on round {broken}, which {why}, and there is no checkpoint in between"
                )
                break
            start = max(starts, default=0)
            if at is None or start > at:
                replay.restore(kept[start]) if start in kept else _begin(replay, chain, report)
                at = start
            checked.append(at + 1)
            if _round(replay, chain, report):
                at += 1
                continue
            broken, at = at + 1, None
            if broken in kept:  # what the run went on with, whatever it followed from
                replay.restore(kept[broken])
                at = broken
                _scores(replay, chain, report)
    if checked:
        report.checked.append(f"rounds {words(checked)}, trained again")
    if is_finished(folder):
        _end(replay, folder, chain, kept, report)


def _begin(replay: Replay, chain: digests.Chain, report: Audit) -> None:
    replay.begin()
    if chain.states.get(0, replay.state) != replay.state:
        report.find(0, "server", "server step", "the state before round 1 is not that of this configuration and seed")


def _round(replay: Replay, chain: digests.Chain, report: Audit) -> bool:
    """Train the next round and compare it; whether it is the same, so that the next may follow."""
    round, again = replay.round + 1, replay.next(report)
    if (known := chain.rounds.get(round)) is None:
        return True  # of a line that is gone the chain says so
    wrong = _clients(again, known, report)
    server = again.state != known["state"] or again.memory.get("server") != known["memory"].get("server")
    if wrong:
        report.unchecked.append(f"the server's step of round {round}, as not all uploads could be reproduced")
    elif server:
        report.find(round, "server", "server step", "the state is not what the server computes from the uploads")
    else:
        _scores(replay, chain, report)
    return not (wrong or server)


def _clients(again: Round, known: Mapping[str, Any], report: Audit) -> set[str]:
    """The clients whose round differs; of each only the first thing that does, as the others follow from it."""
    wrong: set[str] = set()
    sent = "was not sent what follows from the server's state"
    computed = "is not what it computes from the message that it was sent"
    for kind, now, then, what in (
        ("message", again.sent, known["sent"], sent),
        ("client pass", again.uploads, known["uploads"], f"its upload {computed}"),
        ("memory", again.memory, known["memory"], f"its memory {computed}"),
    ):
        for client in sorted({*now, *then} - wrong - {"server"}):
            if now.get(client) != then.get(client):
                wrong.add(client)
                report.find(again.round, client, kind, what)
    return wrong


def _scores(replay: Replay, chain: digests.Chain, report: Audit) -> None:
    """The scores of the round that the replay has reached, as far as it had some."""
    config, round = replay.experiment.config, replay.round
    known = score_line(replay.lines, round, config.eval.during)
    if known is not None and known not in comparable(replay.lines):
        return report.unchecked.append(f"the scores of round {round}, which were computed with other settings")
    if known is not None or (chain.rounds.get(round) or {}).get("due"):
        _compare_scores(replay, known, config.eval.during, report)


def score_line(lines: Collection[dict[str, Any]], round: int, split: str) -> dict[str, Any] | None:
    """The line of metrics.jsonl with the scores of a round; None where there is none."""
    return next((x for x in lines if x["kind"] == "score" and (x["round"], x["split"]) == (round, split)), None)


def _compare_scores(
    replay: Replay, known: Mapping[str, Any] | None, split: str, report: Audit, end: bool = False
) -> None:
    scores = replay.scores(split, each=end)
    if scores is None and known is None:
        return
    line = {"kind": "score", "round": replay.round, "split": split, **(scores.as_json() if scores else {})}
    again = json.loads(json.dumps(line))
    if known is None:
        report.find(replay.round, "", "scores", f"the {split} scores are missing")
    elif again != known:
        keys = [key for key in {**again, **known} if again.get(key) != known.get(key)]
        said = f"{keys[0]} is {known.get(keys[0])} and should be {again.get(keys[0])}"
        report.find(replay.round, "", "scores", f"the {split} scores: {said}")


def _end(replay: Replay, folder: Path, chain: digests.Chain, kept: Mapping[int, Saved], report: Audit) -> None:
    """The end of the run: finishing at the clients, test scores, exported models."""
    try:
        experiment, summary = replay.experiment, read_object(folder / "summary.json")
    except (OSError, ValueError, RecursionError):  # which `kept.summary` has said
        return report.unchecked.append("the end of the run: summary.json is damaged")
    tested, last = summary["round"], summary.get("ended", {"round": experiment.config.rounds})["round"]
    if tested not in kept:
        return report.unchecked.append(f"the end of the run: the checkpoint of round {tested} is missing or damaged")
    replay.restore(kept[tested])
    messages = replay.messages(experiment.scored)
    replay.finish(last)
    known = score_line(replay.lines[::-1], tested, "test")  # the last one, also with eval.during=test
    _compare_scores(replay, known, "test", report, end=True)
    then = {**(delivered(folder) or {}), **(chain.end or {}).get("adapters", {})}
    then = {name: known for name, known in then.items() if name.startswith("adapters/")}
    names = dict.fromkeys(Path(name).parts[1] for name in then)
    method, scored = experiment.method, experiment.scored
    states = experiment.runtime.run({id: method.personalize(scored[id], messages[id]) for id in names})
    with TemporaryDirectory() as scratch:
        for id, state in states.items():
            prompt = experiment.base.prompt_of(experiment.config)
            models.write(Path(scratch) / "adapters" / id, state, scored[id].structure, experiment.base, "", prompt)
        for name, now in digests.delivered(Path(scratch)).items():
            if then.get(name, now) != now and Path(name).name != CARD:
                what = "the exported model does not follow from this round"
                report.find(tested, Path(name).parts[1], "export", what)
    report.checked.append(f"the end of the run, from the checkpoint of round {tested}: test scores, exported models")
