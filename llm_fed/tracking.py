"""What a user sees while a run goes on: a progress bar on a terminal, plain lines in a log file, and experiment
trackers."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from llm_fed.config import Config, TrackConfig
from llm_fed.configfile import as_dict, flat
from llm_fed.errors import UserError, require


def check_trackers(track: TrackConfig) -> None:
    """Refuse a tracker that Accelerate does not know, or whose package is not installed.

    Raises:
        UserError: the name, and what to do.
    """
    for name in track.with_:
        require("track.with", name, LOGGER_TYPE_TO_CLASS)
        if importlib.util.find_spec(name) is None:
            raise UserError(f"track.with names {name}, which is not installed: pip install 'llm-fed[track]'")


class Reporter:
    """Shows a run's records as they come.

    Args:
        console: where to; standard error by default, so that `--json` has standard output for itself.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._rounds = 0
        self._spent = ""
        self._accelerator: Accelerator | None = None

    def note(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False)

    def resumed(self, round: int) -> None:
        """The run goes on with `round`."""
        self.note(f"continuing at round {round}")
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=round - 1)

    def record(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, shown where it tells a user something."""
        if record["kind"] == "round":
            self._round(record)
        elif record["kind"] == "score":
            spread = f" (std {record['std']:.2f} over clients, worst half {record['worst_half']:.2f})"
            self.note(
                f"round {record['round']}: {record['split']} {record['metric']} {record['mean']:.2f}"
                + (spread if len(record["clients"]) > 1 else "")
            )
            self._track(
                {f"{record['split']}/{key}": record[key] for key in ("mean", "std", "worst_half")}, record["round"]
            )
            self._track({f"{record['split']}/clients/{id}": v for id, v in record["clients"].items()}, record["round"])
        elif record["kind"] == "privacy":  # logged before its round's line
            self._spent = "" if record["epsilon"] is None else f", epsilon {record['epsilon']:.3g}"
            self._track({"privacy/epsilon": record["epsilon"]} if self._spent else {}, record["round"])
        elif record["kind"] == "event":
            self.note(f"round {record['round']}: {record['client']}: {record['event']}: {record['reason']}")

    def _round(self, record: Mapping[str, Any]) -> None:
        loss = f"loss {record['loss']:.4f}" if "loss" in record else "nobody trained"
        counted = ("failed", "refused", "dropped_out")
        missing = "".join(f", {record[key]} {key.replace('_', ' ')}" for key in counted if record.get(key))
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=record["round"], description=f"{loss}{self._spent}{missing}")
        else:
            megabytes = (record["bytes_up"] + record["bytes_down"]) / 1e6
            self.note(f"round {record['round']}/{self._rounds}: {loss}, {megabytes:.1f} MB moved{self._spent}{missing}")
        self._track(
            {key: record[key] for key in ("loss", "lr", "bytes_up", "bytes_down", "padding") if key in record},
            record["round"],
        )

    @contextmanager
    def tracking(self, config: Config, folder: Path) -> Iterator[None]:
        """Show a bar over the rounds (terminals only), and start the trackers that the configuration names."""
        self._rounds = config.rounds
        if config.track.with_:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._accelerator = Accelerator(log_with=list(config.track.with_), project_dir=folder / "trackers")
                plain = {
                    key: value if isinstance(value, int | float | str) else str(value)
                    for key, value in flat(as_dict(config)).items()
                }
                self._accelerator.init_trackers(config.track.project, config=plain)
        columns = (
            TextColumn("round"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), TextColumn("{task.description}"),
        )  # fmt: skip
        try:
            if self.console.is_terminal:
                with Progress(*columns, console=self.console) as self._progress:
                    self._bar = self._progress.add_task("", total=config.rounds)
                    yield
            else:
                yield
        finally:
            self._progress = self._bar = None
            if self._accelerator is not None:
                for tracker in self._accelerator.trackers:  # end_training() would also part the ranks of a launch
                    tracker.finish()
                self._accelerator = None

    def _track(self, values: Mapping[str, Any], round: int) -> None:
        if self._accelerator is not None:
            self._accelerator.log(dict(values), step=round)
