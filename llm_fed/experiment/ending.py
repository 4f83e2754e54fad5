"""How a user ends a run before its last round, and has it finish with what there is: `--finish`, or Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.bench.build import Experiment
from llm_fed.federation.progress import UNSCORED
from llm_fed.runs import extend
from llm_fed.runs.folder import Run
from llm_fed.runtime.launch import other_ranks


@dataclass
class Ending:
    """What a user has requested. `why`: why the run is to end after the round that goes on, as its files say it; empty:
    it goes on. `by_key`: whether the first Ctrl-C asks for it. The second one interrupts the run, as does every one of
    a run that has no rounds to end."""

    why: str = ""
    by_key: bool = field(default=False, kw_only=True)

    @contextmanager
    def listening(self, note: Callable[[str], None]) -> Iterator[None]:
        """Within, the first Ctrl-C asks for the end of the run that goes on. Of a merge these are several. `note`: is
        told that it was heard."""
        usual = signal.getsignal(signal.SIGINT)
        own_thread = threading.current_thread() is threading.main_thread()
        # Ctrl-C reaches all processes of a launch, and the others cannot tell when a round ends.
        able = own_thread and usual is signal.default_int_handler and not other_ranks()
        if self.why or not (self.by_key and able):
            yield
            return

        def heard(number: int, frame: FrameType | None) -> None:
            self.why = "Ctrl-C"
            signal.signal(signal.SIGINT, usual)
            note(
                "Ctrl-C: the run ends after this round, and finishes with what there is (scores, adapters); Ctrl-C "
                "again leaves it at once, for the same command to continue"
            )

        signal.signal(signal.SIGINT, heard)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, usual)
            self.why = ""


def check_begun(run: Run, why: str) -> None:
    """Refuse to finish a run with what there is where there is nothing. UserError: no round of it, or of a run that it
    starts from, has a checkpoint. `why`: how the user requested it."""
    if not extend.rounds_done(run.folder) or not run.continues:
        raise UserError(
            f"{why} finishes a run with the rounds that it has, but {run.folder} has no checkpoint of any round; leave "
            "it out to train"
        )


def check_scored(experiment: Experiment) -> None:
    """Refuse a stop rule that would never see a score. UserError: nobody who is scored here has a validation
    example."""
    scored, patience = experiment.scored.values(), experiment.config.stop.patience  # over a network there is nobody
    if scored and not any(site.data.queries.get("validation") for site in scored):
        raise UserError(UNSCORED.format(patience))


def describe(done: Mapping[str, Any], fresh: str) -> str:
    """Of the summary of a finished run how it ended, and what starts it again."""
    rounds = done.get("rounds", done["round"])
    if ended := done.get("ended"):
        return (
            f"it ended after round {ended['round']} of {rounds} ({ended['why']}); {fresh.replace('fresh', 'continue')} "
            f"goes on, {fresh} starts again"
        )
    return f"{rounds} rounds; {fresh} starts again"
