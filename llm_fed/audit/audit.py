"""Audits a run folder: first what it has kept (`kept.py`), then rounds that are trained again, to the last bit
(`again.py`) or, in another environment than the run's, within a tolerance (`elsewhere.py`)."""

from __future__ import annotations

import secrets
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
from llm_fed.experiment.environment import environment
from llm_fed.kinds import Kind
from llm_fed.runs import digests, secrecy
from llm_fed.runs.folder import Run
from llm_fed.runs.reading import is_finished, read_config
from llm_fed.runs.records import read_object, read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import choose_device
from llm_fed.settings import plugins
from llm_fed.settings.config import Config, EngineConfig
from llm_fed.tasks.record import Record

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
    """Check a run folder; it is only read, and what cannot be is "not verified". UserError: the folder is no run, it
    has not recorded one of the rounds, or it names code (`NotAllowed`).

    Args:
        rounds: to train again. Rounds on the way there, from the nearest checkpoint before, are compared as well.
        sample: instead of these so many, which nobody can know before they are drawn (default: `SAMPLE`).
        every: instead of these all.
        base: the run's, where it is loaded already.
    """
    report = Audit()
    chain = _chain(folder, report)
    try:
        config = read_config(folder)
    except UserError as error:
        if not chain.lines or isinstance(error, plugins.NotAllowed):
            raise
        report.unchecked.append(f"all else: {error}")
        return report
    wanted = _wanted(folder, chain, rounds, SAMPLE if sample is None else sample, every)
    try:
        _compare(folder, config, chain, wanted, reporter or Reporter(), base, report)
    except plugins.NotAllowed:
        raise
    except (UserError, RunError) as error:  # of files that are missing or damaged: of the run, its base or its data
        report.unchecked.append(f"the rest: {error}")
    if (folder / digests.FILE).exists() and digests.of_file(folder / digests.FILE) != chain.digest:
        report.unchecked.append("all that was said: the run went on meanwhile; audit it at its end")
    return report


def _chain(folder: Path, report: Audit) -> digests.Chain:
    """digests.jsonl, compared with itself, with metrics.jsonl and with the files that it has digests of."""
    try:
        chain = digests.read(folder, finished=is_finished(folder))
    except UserError as error:
        report.find(0, "", "chain", str(error))
        return digests.Chain([], [])
    for round, flaw in chain.flaws:
        report.find(round, "", "chain", flaw)
    kept.files(folder, chain, report)
    if chain.lines:
        report.checked.append(f"the chain of {len(chain.lines)} lines in {digests.FILE}, and metrics.jsonl")
    else:
        report.unchecked.append(f"digests: the run has no {digests.FILE}")
    return chain


def _wanted(folder: Path, chain: digests.Chain, rounds: Collection[int], sample: int, every: bool) -> list[int]:
    """The rounds to train again, of those that the chain has; UserError where it lacks one that is requested."""
    recorded = sorted(chain.rounds)
    if unknown := sorted(set(rounds) - set(recorded)):
        known = f"{recorded[0]} to {recorded[-1]}" if recorded else "none"
        raise UserError(f"--rounds {unknown[0]}: {folder} only has digests of rounds {known}")
    if every or rounds:
        return recorded if every else sorted(rounds)
    return sorted(secrets.SystemRandom().sample(recorded, min(sample, len(recorded))))


def _compare(
    folder: Path,
    config: Config,
    chain: digests.Chain,
    wanted: Collection[int],
    reporter: Reporter,
    base: Kind | None,
    report: Audit,
) -> None:
    method = methods.build(config.method)
    with _environment(folder, config) as (here, before, changed):
        kept.summary(folder, config, report)
        last = kept.ended(folder, replace(config, rounds=method.together(config.rounds)), report)
        kept.skipped(folder, config, chain, last, report)
        good = kept.checkpoints(folder, chain, report)
        kept.messages(good, chain, method.broadcast, config, report, same_bits=not changed)
        if changed:
            said = f"this is another environment than the run's ({'; '.join(changed)})"
            report.unchecked.append(f"a bit-for-bit comparison: {said}")
        if why := _why_not(folder, config, method.unaudited):
            report.unchecked.append(why)
            return
        rows = splits.known(folder, config)
        with _replay(folder, here, before, reporter, base, rows.all) as replay:
            if (since := _unchanged_since(replay, rows, report)) is None:
                return
            try:
                if changed or not chain.lines:
                    elsewhere.compare(replay, good, since, report)
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


def _why_not(folder: Path, config: Config, of_method: str) -> str:
    """What of a run cannot be computed again here whatever one does, and why (`of_method`: what its method says of
    that); empty: all can."""
    if (folder / "network.json").exists():
        return (
            "clients' training, server steps and scores: over a network, clients keep their examples, and the server "
            "keeps no uploads"
        )
    try:
        why = secrecy.missing(folder) if config.privacy.draws else ""
    except RunError as error:
        why = str(error)
    return f"clients' training, server steps and scores: {why}" if why else of_method


def _unchanged_since(replay: Replay, rows: splits.KnownRows, report: Audit) -> int | None:
    """The round after which the run was trained on the data as they are now; None where they have changed since."""
    if (record := replay.experiment.record) is None or rows.own is None:  # the rows lie elsewhere
        return 0
    if changed := record.since(rows.own):
        report.unchecked.append(f"clients' training and scores: the data have changed since the run ({changed})")
        return None
    if not rows.own.changes:
        return 0
    last = rows.own.changes[-1]
    if last.round:
        why = f"they were trained on other data ({last.words})"
        report.unchecked.append(f"rounds 1 to {last.round}, trained again: {why}")
    return last.round


@contextmanager
def _environment(folder: Path, config: Config) -> Iterator[tuple[Config, Mapping[str, Any], list[str]]]:
    """Compute as the run did, as far as this machine can: (its configuration on a device that is here, what
    environment.json says, what is different here in words)."""
    try:
        before = read_object(folder / "environment.json")
        threads, per_pass = before["threads"], before["clients_per_pass"]
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} has no environment.json, which every run has; audit the runs that a folder was merged from"
        ) from error
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(
            f"{folder / 'environment.json'}, which says where the run was made, cannot be read: {error}"
        ) from error
    usual = torch.get_num_threads()
    if config.device == "cuda" and not torch.cuda.is_available():
        config = replace(config, device="auto")
    if not before.get("captured"):  # also where a GPU might do otherwise
        config = replace(config, engine=EngineConfig(fast="off"))
    torch.set_num_threads(threads)
    try:
        now = environment(torch.device(choose_device(config.device)), config.base.dtype, per_pass, config.engine.fast)
        changed = [f"{key} {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]
        if before.get("continued"):
            changed.append("it was continued in another environment than it began in")
        yield config, before, changed
    finally:
        torch.set_num_threads(usual)


@contextmanager
def _replay(
    folder: Path, config: Config, recorded: Mapping[str, Any], reporter: Reporter, base: Kind | None,
    known: Record | None,
) -> Iterator[Replay]:  # fmt: skip
    """A replay in a folder that is thrown away, of a run whose environment.json is `recorded`."""
    secret = secrecy.read(folder)
    experiment = prepare(config, reporter, base=base, known=known, secret=secret)
    experiment.runtime.clients_per_pass = recorded["clients_per_pass"]
    with TemporaryDirectory() as scratch, Run(Path(scratch) / "replay", config) as run:
        run.begin()
        if secret:
            run.secret = secret  # which is written nowhere else
        yield Replay(experiment, run, read_records(folder / "metrics.jsonl"))
