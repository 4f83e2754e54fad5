"""Audits a run: its chain of digests, what it has kept, and rounds of it that are trained again (`replay.py`)."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from llm_fed import methods
from llm_fed.config import Config
from llm_fed.errors import UserError
from llm_fed.experiment.build import prepare
from llm_fed.experiment.environment import environment
from llm_fed.experiment.replay import Replay, lr_of
from llm_fed.export import models
from llm_fed.messages.wire import WireError, pack
from llm_fed.models.images import ImageBase
from llm_fed.models.loading import Base
from llm_fed.runs import digests
from llm_fed.runs.checkpoint import Checkpoints, Saved
from llm_fed.runs.folder import Run, comparable, read_config, read_records
from llm_fed.runs.rows import Row
from llm_fed.runs.tracking import Reporter

SAMPLE = 3  # rounds that are trained again if nobody says which


@dataclass(frozen=True)
class Finding:
    """Something that is not what it should be.

    Attributes:
        client: whose it is; "server", or empty where it is of the whole run.
        kind: chain | checkpoint | message | client pass | memory | server step | scores | export
    """

    round: int
    client: str
    kind: str
    what: str


@dataclass
class Audit:
    """What was checked, in words; what is wrong; what could not be checked, and why."""

    checked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def find(self, round: int, client: str, kind: str, what: str) -> None:
        if not any((known.round, known.client, known.kind) == (round, client, kind) for known in self.findings):
            self.findings.append(Finding(round, client, kind, what))


def audit(
    folder: Path,
    *,
    rounds: Collection[int] = (),
    sample: int | None = None,
    every: bool = False,
    reporter: Reporter | None = None,
    base: Base | ImageBase | None = None,
) -> Audit:
    """Check a run folder; nothing in it is changed.

    Args:
        rounds: to train again. Rounds on the way there, from the nearest checkpoint before, are compared as well.
        sample: instead of these so many, drawn with the run's seed (default: `SAMPLE`).
        every: instead of these all.
        base: the run's, where it is loaded already.

    Raises:
        UserError: the folder is no run, has no digests.jsonl, or has not recorded one of the rounds.
        RunError: another process writes to it.
    """
    config = read_config(folder)
    done = (folder / "summary.json").exists()
    chain, found = digests.read(folder, finished=done), Audit()
    recorded = sorted(chain.rounds)
    if unknown := sorted(set(rounds) - set(recorded)):
        known = f"{recorded[0]} to {recorded[-1]}" if recorded else "none"
        raise UserError(f"--rounds {unknown[0]}: {folder} has digests of rounds {known}")
    with Run(folder, config):
        for round, flaw in chain.flaws:
            found.find(round, "", "chain", flaw)
        found.checked.append(f"the chain of {len(chain.lines)} lines, and metrics.jsonl beside it")
        _summary(folder, found)
        _skipped(folder, config, chain, found)
        kept = _kept(folder, config, chain, found)
        count = SAMPLE if sample is None else sample
        drawn = random.Random(config.training_seed).sample(recorded, min(count, len(recorded)))
        wanted = recorded if every else sorted(rounds) if rounds else sorted(drawn)
        if (folder / "network.json").exists():
            found.unchecked.append(
                "client passes, server steps and scores: the clients of a network keep their examples, and the server "
                "keeps no upload that it has taken in"
            )
        elif methods.build(config.method).needs:
            found.unchecked.append(
                "the merging itself; the runs that it started from are in needs/, audit each of them"
            )
        else:
            _train_again(folder, config, chain, kept, wanted, found, reporter or Reporter(), base)
    return found


def _summary(folder: Path, found: Audit) -> None:
    """The test scores in summary.json are those of metrics.jsonl."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except OSError:
        return
    except ValueError as error:
        return found.find(0, "", "scores", f"summary.json is damaged: {error}")
    tested = [line for line in read_records(folder / "metrics.jsonl") if line.get("split") == "test" and line["round"]]
    if "clients" in summary["scores"] and tested[-1:] != [summary["scores"]]:
        found.find(summary["round"], "", "scores", "the test scores in summary.json are not those of metrics.jsonl")


def _skipped(folder: Path, config: Config, chain: digests.Chain, found: Audit) -> None:
    """Rounds that were to be scored and were not, where others were."""
    lines = [line for line in read_records(folder / "metrics.jsonl") if line["kind"] == "score" and line["round"]]
    scored = {line["round"] for line in lines if line["split"] == config.eval.during}
    for round, line in chain.rounds.items() if scored else ():
        if line["due"] and round not in scored:
            found.find(round, "", "scores", f"the {config.eval.during} scores of this round are missing")


def _kept(folder: Path, config: Config, chain: digests.Chain, found: Audit) -> dict[int, Saved]:
    """The checkpoints that are as the chain says, by round; and what was exported."""
    checkpoints, good = Checkpoints(folder / "checkpoints"), {}
    method = methods.build(config.method)
    for round in checkpoints.rounds():
        before = len(found.findings)
        try:
            saved = checkpoints.load(round)
        except WireError as error:
            found.find(round, "", "checkpoint", str(error))
            continue
        _compare_checkpoint(saved, chain, found)
        following = chain.rounds.get(round + 1)
        if len(found.findings) > before:
            continue
        good[round] = saved
        for client, known in following["sent"].items() if following else ():
            sent = pack(method.broadcast(saved.state["state"], client), config.transport.down)
            if digests.digest(sent) != known:
                found.find(round + 1, client, "message", f"was not sent what follows from the state of round {round}")
    found.checked.append(f"the checkpoints of rounds {_words(good)}, and the messages that follow from them")
    if chain.end is not None:
        now = digests.of_files(folder)
        for name in sorted({*now, *chain.end["adapters"]}):
            if now.get(name) != chain.end["adapters"].get(name):
                client = Path(name).parts[1]
                found.find(chain.end["round"], client, "export", f"{name} is not what the run has written")
        found.checked.append(f"{len(now)} exported files")
    return good


def _compare_checkpoint(saved: Saved, chain: digests.Chain, found: Audit) -> None:
    round = saved.round
    if round not in chain.states:
        return
    if digests.of_message(saved.state["state"]) != chain.states[round]:
        found.find(round, "server", "checkpoint", "the server's state is not that which the run had")
    for key, client, asked, *_ in saved.state["in_flight"]:
        row = saved.rows[key]
        known = chain.rounds.get(asked, {}).get("uploads", {}).get(client)
        if isinstance(row, Row) and known not in (None, row.digest):
            found.find(round, client, "checkpoint", f"its upload of round {asked} is not that which came in")
    remembered: dict[str, str] = {}
    for line in (line for line in chain.lines if line["kind"] == "round" and line["round"] <= round):
        remembered |= line["memory"]
    for client, known in remembered.items():
        key = "server" if client == "server" else f"memory/{client}"
        if digests.of_memory(saved.memory(key)) != known:
            found.find(round, client, "checkpoint", "what it remembers is not what it remembered then")


def _train_again(
    folder: Path,
    config: Config,
    chain: digests.Chain,
    kept: Mapping[int, Saved],
    wanted: Collection[int],
    found: Audit,
    reporter: Reporter,
    base: Base | ImageBase | None,
) -> None:
    with _prepared(folder, config, found, reporter, base) as replay:
        if replay is None:
            return
        checked: list[int] = []
        broken = 0  # the last round that differs
        for target in wanted:
            start = max((round for round in kept if broken <= round < target), default=0)
            if start < broken:
                found.unchecked.append(
                    f"round {target}: it follows from round {broken}, and no checkpoint in between is kept"
                )
                continue
            if target <= replay.round:
                continue
            if start > replay.round or broken > replay.round or not (checked or replay.round):
                replay.restore(kept[start]) if start else _begin(replay, chain, found)
            while replay.round < target:
                checked.append(replay.round + 1)
                if not _round(replay, folder, chain, found):
                    broken = replay.round
                    break
            if broken == replay.round and broken in kept:
                replay.restore(kept[broken])
                _scores(replay, folder, chain, found)
            if broken and broken < target:
                found.unchecked.append(f"round {target}: it follows from round {broken}, which differs")
        found.checked.append(f"rounds {_words(checked)}, trained again")
        if (folder / "summary.json").exists():
            _end(replay, folder, chain, kept, found)


@contextmanager
def _prepared(
    folder: Path, config: Config, found: Audit, reporter: Reporter, base: Base | ImageBase | None
) -> Iterator[Replay | None]:
    """A replay that computes as the run did; None where this machine cannot."""
    before = json.loads((folder / "environment.json").read_text())
    threads = torch.get_num_threads()
    torch.set_num_threads(before["threads"])
    try:
        experiment = prepare(config, reporter, base=base)
        experiment.runtime.clients_per_pass = before["clients_per_pass"]
        now = environment(experiment)
        if changed := [f"{key} {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]:
            found.unchecked.append(
                f"all that is trained again: this is another environment than the run's ({'; '.join(changed)}), where "
                "results may differ in the last bits"
            )
            yield None
            return
        with TemporaryDirectory() as scratch, Run(Path(scratch) / "replay", config) as run:
            run.begin()
            yield Replay(experiment, run)
    finally:
        torch.set_num_threads(threads)


def _begin(replay: Replay, chain: digests.Chain, found: Audit) -> None:
    replay.begin()
    if chain.states.get(0, replay.state) != replay.state:
        found.find(0, "server", "server step", "the state before round 1 is not that of this configuration and seed")


def _round(replay: Replay, folder: Path, chain: digests.Chain, found: Audit) -> bool:
    """Train the next round and compare it; whether it is the same, so that the next may follow."""
    round = replay.round + 1
    lines = [line for line in read_records(folder / "metrics.jsonl") if line["kind"] == "round"]
    recorded = next((line.get("lr") for line in lines if line["round"] == round), None)
    lr = lr_of(replay, round, recorded)
    if lr is None:
        found.find(round, "", "client pass", f"the learning rate {recorded} is not that of the configuration")
        lr = replay.experiment.config.local.lr
    again, known = replay.next(lr), chain.rounds.get(round)
    if known is None:  # from before the run took digests down
        return True
    wrong = set()
    for client in sorted({*again.sent, *known["sent"]}):
        if again.sent.get(client) != known["sent"].get(client):
            wrong.add(client)
            found.find(round, client, "message", "was not sent what follows from the server's state")
    for client in sorted({*again.uploads, *known["uploads"]} - wrong):
        if again.uploads.get(client) != known["uploads"].get(client):
            wrong.add(client)
            found.find(round, client, "client pass", "what came in is not what it makes of what it was sent")
    for client in sorted({*again.memory, *known["memory"]} - wrong - {"server"}):
        if again.memory.get(client) != known["memory"].get(client):
            wrong.add(client)
            found.find(round, client, "memory", "what it remembers is not what it makes of what it was sent")
    server = again.state != known["state"] or again.memory.get("server") != known["memory"].get("server")
    if server and not wrong:
        found.find(round, "server", "server step", "the state is not what the server makes of what came in")
    elif wrong:
        found.unchecked.append(f"the server's step of round {round}, as what came in could not be made again")
    if server or wrong:
        return False
    _scores(replay, folder, chain, found)
    return True


def _scores(replay: Replay, folder: Path, chain: digests.Chain, found: Audit) -> None:
    """The scores of the round that the replay has reached, as far as it had some."""
    config, round = replay.experiment.config, replay.round
    lines = read_records(folder / "metrics.jsonl")
    known = _line(lines, round, config.eval.during)
    if known is not None and known not in comparable(lines):
        return found.unchecked.append(f"the scores of round {round}, which were made with other settings")
    if known is not None or (chain.rounds.get(round) or {}).get("due"):
        _compare_scores(replay, known, config.eval.during, found)


def _line(lines: Collection[dict[str, Any]], round: int, split: str) -> dict[str, Any] | None:
    return next((x for x in lines if x["kind"] == "score" and (x["round"], x["split"]) == (round, split)), None)


def _compare_scores(replay: Replay, known: Mapping[str, Any] | None, split: str, found: Audit) -> None:
    summary = replay.scores(split)
    if summary is None and known is None:
        return
    line = {"kind": "score", "round": replay.round, "split": split, **(summary.as_json() if summary else {})}
    again = json.loads(json.dumps(line))
    if known is None:
        found.find(replay.round, "", "scores", f"the {split} scores are missing")
    elif again != known:
        keys = [key for key in {**again, **known} if again.get(key) != known.get(key)]
        said = f"{keys[0]} is {known.get(keys[0])} and should be {again.get(keys[0])}"
        found.find(replay.round, "", "scores", f"the {split} scores: {said}")


def _end(replay: Replay, folder: Path, chain: digests.Chain, kept: Mapping[int, Saved], found: Audit) -> None:
    """The end of the run: finishing at the clients, test scores, exported models."""
    experiment, tested = replay.experiment, json.loads((folder / "summary.json").read_text())["round"]
    if tested not in kept:
        return found.unchecked.append(
            f"the end of the run: the checkpoint of round {tested} is not there, or not whole"
        )
    replay.restore(kept[tested])
    messages = replay.messages()
    replay.finish()
    _compare_scores(replay, _line(read_records(folder / "metrics.jsonl"), tested, "test"), "test", found)
    names = [Path(name).parts[1] for name in (chain.end or {}).get("adapters", {})]
    method, scored = experiment.method, experiment.scored
    states = experiment.runtime.run({id: method.personalize(scored[id], messages[id]) for id in dict.fromkeys(names)})
    with TemporaryDirectory() as scratch:
        for id, state in states.items():
            models.write(Path(scratch) / "adapters" / id, state, scored[id].structure, experiment.base, "")
        for name, now in digests.of_files(Path(scratch)).items():
            if (chain.end or {})["adapters"].get(name) != now:
                what = "the exported model is not what the last step makes of this round"
                found.find(tested, Path(name).parts[1], "export", what)
    found.checked.append(f"the end of the run, from the checkpoint of round {tested}: test scores, exported models")


def _words(rounds: Collection[int]) -> str:
    return ", ".join(map(str, sorted(rounds))) or "none"
