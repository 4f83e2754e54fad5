"""Mode: what differs between a run whose clients are simulated here and one whose clients are on other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from llm_fed.bench.build import Experiment
from llm_fed.federation.loop import Federation, Scoring
from llm_fed.federation.progress import Progress
from llm_fed.runs.folder import Run
from llm_fed.runs.pace import Ahead
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import Config
from llm_fed.tasks.record import Record

Train = Callable[..., dict[str, Any]]  # `run.train`


class Mode(Protocol):
    """The steps of `run.train` that depend on where the clients are, in their order. All may raise UserError and
    RunError."""

    @property
    def fresh(self) -> str:
        """How the user asks for a run that starts again."""

    @property
    def parents(self) -> Mapping[str, Path]:
        """Of a merge, by the name of a parent its folder, where that is not `needs/<name>`."""

    @property
    def known(self) -> Record | None:
        """Rows that keep the split which they have in a run for which this one is trained."""

    def check(self, config: Config, folder: Path) -> None:
        """Refuse what cannot be done, before the folder is looked at."""

    def turn(self, reporter: Reporter) -> AbstractContextManager[None]:
        """Within, this process works on the run."""

    def reopens(self, run: Run, done: Mapping[str, Any]) -> bool:
        """Whether a run with this summary is still to be finished."""

    def opened(self, run: Run, reporter: Reporter) -> None:
        """Before anything is loaded."""

    def given(self, config: Config, known: Record | None) -> dict[str, Any]:
        """Of the arguments of `build.prepare` those that say which data are here.

        Args:
            known: the rows that the run knows.
        """

    def ready(self, experiment: Experiment, run: Run, reporter: Reporter) -> Experiment:
        """The last checks before the run takes its folder over."""

    def begun(self, experiment: Experiment, run: Run, reporter: Reporter) -> None:
        """After it has."""

    def merge(self, experiment: Experiment, run: Run, reporter: Reporter, train: Train) -> dict[str, Any]:
        """The whole of a merge; its summary."""

    def plan(self, experiment: Experiment, run: Run, reporter: Reporter) -> Ahead:
        """What the run will do, for the estimate of its time."""

    def federation(self, experiment: Experiment) -> tuple[Federation, Scoring]:
        """Who takes part in the rounds, and how they are scored."""

    def finish(self, experiment: Experiment, run: Run, progress: Progress) -> dict[str, Any]:
        """Everything after the last round, from the progress that is tested; the summary."""
