"""What a process does that trains runs of a comparison beside other such processes, see `side_by_side`."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.terminal import Terminal, lasting_streams
from llm_fed.bench.bases import Bases
from llm_fed.experiment.baselines import Baselines
from llm_fed.experiment.job import attempt
from llm_fed.experiment.run import quiet
from llm_fed.experiment.sharing import keep_to_share
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.portable import Codec
from llm_fed.runtime.processes import serve
from llm_fed.settings import plugins
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict
from llm_fed.settings.contents import Contents


@dataclass(frozen=True)
class RunOrder:
    """A run to be trained.

    Attributes:
        parents: by name the folders of the runs that it starts from.
        finished: of runs that have ended since the last order: configuration, `base` of the summary, and folder.
    """

    config: Config
    folder: str
    parents: Mapping[str, str]
    finished: Sequence[tuple[Config, Mapping[str, Any], str]]


@dataclass
class Trainer:
    """Trains one run after another, which share what runs of one command share."""

    bases: Bases = field(default_factory=lambda: Bases(reuse=True))
    baselines: Baselines = field(default_factory=Baselines)
    contents: Contents = field(default_factory=Contents)

    def __call__(self, data: bytes) -> bytes:
        """The reply to an order: why the run has failed, or an empty text."""
        order = Codec().unpack(data)
        for config, base, folder in order.finished:
            self.baselines.remember(config, {"base": base}, Path(folder))
        return Codec().pack(self._failure(order))

    def _failure(self, order: RunOrder) -> str:
        reporter = Reporter(Terminal(stderr=True, force_terminal=False, force_jupyter=False))
        parents = {name: Path(folder) for name, folder in order.parents.items()}
        try:
            with plugins.allowing(plugins.named_in(as_dict(order.config)).values()), reporter.working():
                base = self.bases.of(order.config)
                outcome = attempt(
                    order.config, Path(order.folder), parents, reporter, base, self.contents, self.baselines
                )
        except (RunError, UserError) as error:
            return " ".join(str(error).split())
        except Exception as error:  # a fault of the program; other runs may not have it
            traceback.print_exc()
            return " ".join(f"{type(error).__name__}: {error}".split())
        return outcome if isinstance(outcome, str) else ""


def main(number: int) -> None:
    """The process."""
    quiet()
    keep_to_share()
    with lasting_streams():
        serve(number, Trainer())
