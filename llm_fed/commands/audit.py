"""`llm-fed audit`: what was checked of a run, what differs, and what could not be checked."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from llm_fed.audit.audit import audit
from llm_fed.audit.findings import Audit
from llm_fed.basics.errors import UserError, printable
from llm_fed.experiment.run import quiet

_OUTCOMES = {0: "nothing differs", 1: "differs", 3: "not verified"}


def show(folder: Path, rounds: str | None, sample: int | None, every: bool, as_json: bool) -> int:
    """Audit a run folder and print the outcome; the exit code (`Audit.code`).

    Raises:
        UserError: the options are wrong, or see `audit`.
    """
    if sum(given is not None for given in (rounds, sample)) + every > 1:
        raise UserError("give only one of --rounds, --sample and --all")
    try:
        chosen = [int(word) for word in rounds.split(",")] if rounds else []
    except ValueError as error:
        raise UserError(f"--rounds {rounds} is not a list of rounds; give numbers, e.g. --rounds 1,5") from error
    quiet()
    report = audit(folder, rounds=chosen, sample=sample, every=every)
    if as_json:
        print(json.dumps({"outcome": _OUTCOMES[report.code], **asdict(report)}))
    else:
        _print(report)
    return report.code


def _print(report: Audit) -> None:
    for line in report.checked:
        print(printable(f"checked      {line}"))
    for line in report.unchecked:
        print(printable(f"NOT VERIFIED {line}"))
    for item in report.findings:
        where = f"round {item.round}" + (f", {item.client}" if item.client else "")
        print(printable(f"DIFFERS      {where}: {item.kind}: {item.what}"))
    print(f"{len(report.findings)} findings" if report.findings else _OUTCOMES[report.code])
