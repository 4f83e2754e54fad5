"""One run of a comparison: what it is, how it is trained, and what the table shows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import check_unlinked
from llm_fed.bench.costs import ClientWork, Traffic, read_traffic, read_work
from llm_fed.eval.tables import RunResult, means
from llm_fed.experiment import run as experiment
from llm_fed.experiment import splits
from llm_fed.experiment.baselines import Baselines, shared_by
from llm_fed.experiment.simulation import Simulation, lacks_exports
from llm_fed.federation import privacy
from llm_fed.kinds import Kind
from llm_fed.method import Method
from llm_fed.runs import inputs
from llm_fed.runs.folder import Run, holds_results
from llm_fed.runs.inputs import Contents
from llm_fed.runs.reading import events, shares_of, validated
from llm_fed.runs.tracking import Reporter
from llm_fed.scoring.scores import without
from llm_fed.settings.config import Config

Cost = TypeVar("Cost", Traffic, ClientWork)


@dataclass(eq=False)
class Job:
    """One run, which several rows may share."""

    config: Config
    method: Method
    folder: Path
    shown: str  # the folder as the table names it, seen from where the table lies
    contents: Contents  # of the files that all runs name
    parents: dict[str, Job] = field(default_factory=dict)  # by name: the runs that a merge starts from
    outcome: dict[str, Any] | str = ""  # summary.json of a finished run; of a failed one the reason; "": still open

    def read(self) -> None:
        """Take over what lies on disk; UserError if the folder holds another run, or is a link."""
        check_unlinked(self.folder)
        if self.folder.exists():
            with Run(self.folder, self.config, contents=self.contents) as run:
                if (done := run.summary()) is not None:
                    inputs.check_finished(run.folder, run.config, run.contents)
                self.outcome = "" if done is None or lacks_exports(run) else done

    @property
    def begun(self) -> bool:
        return holds_results(self.folder)

    @property
    def is_local(self) -> bool:
        return bool(self.config.method["name"] == "local")

    @property
    def hindrance(self) -> str:
        """Why it cannot be trained, as a run that it starts from has failed; empty where none has."""
        failed = ((name, parent.outcome) for name, parent in self.parents.items() if isinstance(parent.outcome, str))
        return next((f"its {name} run failed: {reason}" for name, reason in failed if reason), "")

    def train(self, reporter: Reporter, base: Kind, baselines: Baselines) -> None:
        """Run it, or continue it, to its end. What goes wrong is its outcome."""
        folders = {name: parent.folder for name, parent in self.parents.items()}
        try:
            self.outcome = self.hindrance or experiment.train(
                self.config,
                self.folder,
                reporter=reporter,
                base=base,
                contents=self.contents,
                mode=Simulation(folders, baselines=baselines),
            )
        except (RunError, UserError, torch.OutOfMemoryError) as error:
            self.outcome = " ".join(str(error).split())

    def result(self, uncounted: Set[str] = frozenset()) -> RunResult:
        """What the table shows of a run. `uncounted`: clients in no mean, as another row cannot score them."""
        assert isinstance(self.outcome, dict)
        scores, base, rule = self.outcome["scores"], self.outcome.get("base"), self.outcome.get("rule")
        counted = without(scores, uncounted) if "clients" in scores else scores
        line = validated(self.folder, "validation", self.outcome["round"])
        return RunResult(
            folder=self.shown,
            round=self.outcome["round"],
            clients=scores.get("clients", {}),
            average=counted.get("mean"),
            worst_half=counted.get("worst_half"),
            base=base and without(base, uncounted),
            rule=rule and without(rule, uncounted),
            shared=shared_by(self.config, scores.get("metric", "")),
            traffic=self._with_parents(read_traffic),
            work=self._with_parents(read_work),
            federation=self.config.federation_seed,
            training=self.config.training_seed,
            warnings=self.outcome.get("warnings", ()),
            events=dict(self._events()),
            unscored=scores.get("unscored", []),
            undefined=scores.get("undefined", []),
            only_tested=self.outcome.get("only_tested", []),
            uncounted=sorted(uncounted & scores.get("clients", {}).keys()),
            beside=means(counted),
            tested=splits.tested(self.folder),
            shares=shares_of(self.outcome),
            validation=without(line, uncounted)["mean"] if line else None,
        )

    def _events(self) -> Counter[str]:
        """What went wrong, here and in the runs that this one starts from."""
        return sum((parent._events() for parent in self.parents.values()), events(self.folder))

    def _with_parents(self, read: Callable[[Path, int | None], Cost], last_round: int | None = None) -> Cost:
        """What it took up to a round, with what its parents took up to the rounds that are merged."""
        assert isinstance(self.outcome, dict)
        needs = self.outcome.get("needs", {})
        parents = (parent._with_parents(read, needs[name]) for name, parent in self.parents.items())
        return sum(parents, read(self.folder, last_round))


def spent_together(jobs: Iterable[Job]) -> str:
    """What those that are finished have spent of their clients' privacy in all, as a sentence; empty: no privacy."""
    return privacy.together([job.outcome.get("privacy") for job in jobs if isinstance(job.outcome, dict)])
