"""Audits a run folder: first what it has kept (`kept.py`), then rounds that are trained again, to the last bit
(`again.py`) or, in another environment than the run's, within a tolerance (`elsewhere.py`)."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from llm_fed import methods
from llm_fed.audit import again, elsewhere, kept
from llm_fed.audit.findings import Audit
from llm_fed.audit.replay import Replay
from llm_fed.basics.errors import RunError, UserError, one_line
from llm_fed.bench.build import prepare
from llm_fed.experiment import splits
from llm_fed.experiment.environment import FORMERLY, WAYS, environment, use_recorded
from llm_fed.kinds import Kind
from llm_fed.runs import digests
from llm_fed.runs.folder import Run
from llm_fed.runs.reading import read_config
from llm_fed.runs.records import read_object
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import choose_device
from llm_fed.settings.config import Config
from llm_fed.tasks.record import Change, Record

SAMPLE = 3  # rounds that are trained again if nobody says which


def audit(
    folder: Path,
    *,
    rounds: Collection[int] = (),
    sample: int | None = None,
    every: bool = False,
    reporter: Reporter | None = None,
    base: Kind | None = None,
) -> Audit:
    """Check a run folder; nothing that the run has written there is changed.

    Args:
        rounds: to train again. Rounds on the way there, from the nearest checkpoint before, are compared as well.
        sample: instead of these so many, drawn with the run's seed (default: `SAMPLE`).
        every: instead of these all.
        base: the run's, where it is loaded already.

    Raises:
        UserError: the folder is no run, its digests.jsonl is no JSON, or it has not recorded one of the rounds.
        RunError: another process writes to it.
    """
    config, report = read_config(folder), Audit()
    method = methods.build(config.method)
    chain = digests.read(folder, finished=(folder / "summary.json").exists())
    recorded = sorted(chain.rounds)
    if unknown := sorted(set(rounds) - set(recorded)):
        known = f"{recorded[0]} to {recorded[-1]}" if recorded else "none"
        raise UserError(f"--rounds {unknown[0]}: {folder} only has digests of rounds {known}")
    drawn = random.Random(config.training_seed).sample(
        recorded, min(SAMPLE if sample is None else sample, len(recorded))
    )
    wanted = recorded if every else sorted(rounds or drawn)
    with Run(folder, config), _environment(folder, config) as (here, before, changed):
        _chain(chain, report)
        kept.summary(folder, config, report)
        last = kept.ended(folder, replace(config, rounds=method.together(config.rounds)), report)
        kept.skipped(folder, config, chain, last, report)
        good = kept.checkpoints(folder, chain, report)
        kept.messages(good, chain, method.broadcast, config, report, same_bits=not changed)
        kept.exports(folder, chain, report)
        if changed:
            said = f"this is another environment than the run's ({'; '.join(changed)})"
            report.unchecked.append(f"a bit-for-bit comparison: {said}")
        if (folder / "network.json").exists():
            report.unchecked.append(
                "clients' training, server steps and scores: over a network, clients keep their examples, and the "
                "server keeps no uploads"
            )
        elif method.unaudited:
            report.unchecked.append(method.unaudited)
        else:
            rows = splits.known(folder, config)
            with _replay(here, before, reporter or Reporter(), base, rows.all) as replay:
                since = _unchanged_since(replay, rows, report)
                if since is None:
                    return report
                try:
                    if changed or not chain.lines:
                        elsewhere.compare(replay, folder, good, since, report)
                    else:
                        again.compare(replay, folder, chain, good, wanted, since, report)
                except (UserError, RunError):
                    raise
                except Exception as error:
                    # States that are not this method's, as of a config.yaml that was changed, may lack what it reads.
                    if not report.findings:
                        raise
                    why = f"{type(error).__name__}: {one_line(str(error))}"
                    report.unchecked.append(f"the rest, which cannot be computed from what was found ({why})")
    return report


def _unchanged_since(replay: Replay, rows: splits.KnownRows, report: Audit) -> int | None:
    """The round after which the run was trained on the data as they are now; None where they have changed since."""
    record = replay.experiment.record
    if record is None or rows.own is None:  # of an earlier version, which did not remember its rows
        return 0
    if changed := record.since(rows.own):
        words = Change(0, changed).words()
        report.unchecked.append(f"clients' training and scores: the data have changed since the run ({words})")
        return None
    if not rows.own.changes:
        return 0
    last = rows.own.changes[-1]
    if last.round:
        report.unchecked.append(
            f"rounds 1 to {last.round}, trained again: they were trained on other data ({last.words()})"
        )  # fmt: skip
    return last.round


def _chain(chain: digests.Chain, report: Audit) -> None:
    for round, flaw in chain.flaws:
        report.find(round, "", "chain", flaw)
    if not chain.lines:
        return report.unchecked.append(f"digests: an earlier version made the run, without {digests.FILE}")
    report.checked.append(f"the chain of {len(chain.lines)} lines in {digests.FILE}, and metrics.jsonl")
    if chain.lines[0]["kind"] == "begin" and (before := chain.lines[0]["round"]):
        report.unchecked.append(f"rounds 1 to {before}, which an earlier version trained without recording digests")


@contextmanager
def _environment(folder: Path, config: Config) -> Iterator[tuple[Config, Mapping[str, Any], list[str]]]:
    """Compute as the run did, as far as this machine can: (its configuration on a device that is here, what
    environment.json says, what is different here in words)."""
    try:
        before = {**FORMERLY, **read_object(folder / "environment.json")}
        threads, per_pass = before["threads"], before["clients_per_pass"]
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(
            f"{folder / 'environment.json'}, which says where the run was made, cannot be read: {error}"
        ) from error
    usual = torch.get_num_threads()
    if config.device == "cuda" and not torch.cuda.is_available():
        config = replace(config, device="auto")
    off: dict[str, Any] = {
        setting: "off" for setting, key in WAYS.items() if not before[key]
    }  # also where a GPU might do otherwise
    config = replace(config, engine=replace(config.engine, **off))
    torch.set_num_threads(threads)
    try:
        now = environment(torch.device(choose_device(config.device)), config.base.dtype, per_pass, config.engine)
        changed = [f"{key} {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]
        if before.get("continued"):
            changed.append("it was continued in another environment than it began in")
        yield config, before, changed
    finally:
        torch.set_num_threads(usual)


@contextmanager
def _replay(
    config: Config, recorded: Mapping[str, Any], reporter: Reporter, base: Kind | None, known: Record | None
) -> Iterator[Replay]:
    """Args:
    recorded: what environment.json says.
    known: the rows that the run knows.
    """
    experiment = prepare(config, reporter, base=base, known=known)
    experiment.runtime.clients_per_pass = recorded["clients_per_pass"]
    use_recorded(experiment, recorded)
    with TemporaryDirectory() as scratch, Run(Path(scratch) / "replay", config) as run:
        run.begin()
        yield Replay(experiment, run)
