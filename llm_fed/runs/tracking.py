"""What a user sees while a run goes on: a progress bar on a terminal, plain lines in a log file, and experiment
trackers; and how long the parts of a round took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.text import Text

from llm_fed.basics import signs
from llm_fed.basics.errors import UserError, did_you_mean, printable
from llm_fed.basics.terminal import Terminal, in_notebook
from llm_fed.runs.pace import Pace
from llm_fed.runs.records import time_of_day
from llm_fed.runs.trackers import Trackers, tracked
from llm_fed.settings.config import Config

# on_step: {"round", "step", "steps", "loss"} after an optimizer step of a pass over clients; on_round, on_scores: the
# line of metrics.jsonl on a round, and on scores; on_end: the result.
HOOKS = ("on_step", "on_round", "on_scores", "on_end")
_LISTED = ", ".join(HOOKS)


class Reporter:
    """Shows a run's records as they come, and that it goes on while none comes.

    Args:
        console: where to; standard error by default, so that `--json` has standard output for itself.
        interval: in a log file, the most seconds without a line while work goes on.
        clock: seconds that pass, for all that is estimated.
        callbacks: are told of what happens.
    """

    def __init__(
        self,
        console: Console | None = None,
        interval: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        callbacks: Callbacks | None = None,
    ):
        self.callbacks = callbacks or Callbacks()
        # Never rich's own way in notebooks, which makes a block of HTML of each line; and what a kernel writes to may
        # call itself a terminal, though no bar can move there.
        no_bars = {"force_terminal": False} if in_notebook() else {}
        self.console = console or Terminal(stderr=True, force_jupyter=False, **no_bars)
        self.pace = Pace(clock=clock)
        self._interval, self._clock = interval, clock
        self._lock, self._printed = threading.RLock(), clock()  # when the last line was printed
        self._working = False
        self._stamped = False  # whether lines begin with the time
        self._estimated = False  # whether this run has said how long it will take
        self._status: Status | None = None
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._rounds = 0  # of the run
        self._spent = self._missing = ""
        self._without_loss = "no client trained"
        self._said: set[str] = set()
        self._trackers: Trackers | None = None
        self._announced: dict[str, str] = {}

    def note(self, text: str) -> None:
        """One line."""
        with self._lock:
            stamp = time.strftime("%H:%M:%S ") if self._stamped and not self.console.is_terminal else ""
            self.console.print(stamp + printable(text).replace("\n", " "))
            self._printed = self._clock()

    def announce(self, rows: Mapping[str, str]) -> None:
        """A run's plan, aligned; of further runs only what differs from the one before."""
        for label, text in rows.items():
            if self._announced.get(label) != text:
                self.note(f"{label:<11}{text}")
        self._announced = dict(rows)

    def note_once(self, text: str) -> None:
        """One line, unless it was said before: several runs of one command may share their data."""
        if text not in self._said:
            self._said.add(text)
            self.note(text)

    def resumed(self, round: int) -> None:
        """The run goes on with `round`."""
        self.note(f"continuing at round {round}")
        self.pace.number = round - 1
        if self._trackers is not None:
            self._trackers.resumed(round - 1)

    def ended_early(self, round: int, why: str) -> None:
        """The run has ended before its last round; no more are expected."""
        self.note(f"ended after round {round} of {self._rounds}: {why}")
        self.pace.rounds = round

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, no silence lasts longer than the interval: on a terminal something moves, in a log file lines come.

        Runs that are trained within another one's are part of its work.
        """
        if self._working or (self.console.quiet and not self.callbacks):
            yield
            return
        self._working, self._printed, stop = True, self._clock(), threading.Event()
        thread = threading.Thread(target=self._beat, args=[stop], name="heartbeat", daemon=True)
        if not self.console.is_terminal and not self.console.quiet:
            thread.start()
        try:
            with signs.heard_by(self):
                yield
        finally:
            stop.set()
            if thread.is_alive():
                thread.join()
            self._working = False

    def _beat(self, stop: threading.Event) -> None:
        """A line whenever none has come for the interval; the first estimate of a run comes earlier."""
        while not stop.wait(self._interval / 30):
            with self._lock:
                silent = self._clock() - self._printed
                left = self.pace.left()
                early = left and not self._estimated and silent >= self._interval / 6
                if not (early or silent >= self._interval) or stop.is_set():
                    continue
                self._estimated = self._estimated or bool(left)
                was, self._stamped = self._stamped, True
                self.note(", ".join(filter(None, [self.pace.where() or "still at work", left])))
                self._stamped = was

    # What is told while work goes on, see `signs.Listener`.

    def round(self, number: int) -> None:
        self.pace.round(number)
        self.callbacks.round(number)

    def round_ended(self) -> None:
        self.pace.round_ended()

    def begin(self, part: str) -> None:
        self.pace.begin(part)
        if self.console.is_terminal and self._progress is None and self._status is None:
            self._status = self.console.status(_Live(self.pace.where))
            self._status.start()

    def end(self, part: str) -> None:
        self.pace.end(part)
        if self._status is not None:
            self._status.stop()
            self._status = None

    def step(self, number: int, of: int, amount: float, total: float, loss: float | None) -> None:
        self.pace.step(number, of, amount, total, loss)
        if self.callbacks and self.pace.number:
            self.callbacks.step(number, of, loss)
        if self._trackers is not None:
            self._trackers.step(loss)

    def answered(self, amount: float) -> None:
        self.pace.answered(amount)

    def record(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, shown where it tells a user something."""
        self.callbacks.record(record)
        if record["kind"] == "round":
            self._round(record)
        elif record["kind"] in ("score", "after"):
            spread = f" (std {record['std']:.2f} over clients, worst half {record['worst_half']:.2f})"
            loss = "" if record["loss"] is None else f", loss {record['loss']:.4f}"
            alone = "" if record["round"] else " (the base alone)"
            alone += f" and {record['what']}" if "what" in record else ""
            self.note(
                f"round {record['round']}{alone}: {record['split']} {record['metric']} {record['mean']:.2f}"
                + (spread if len(record["clients"]) > 1 else "")
                + loss
                + "".join(f", {name} {of['mean']:.4g}" for name, of in record.get("beside", {}).items())
            )
            values = {key: record[key] for key in ("mean", "std", "worst_half", "loss")}
            values |= {name: of["mean"] for name, of in record.get("beside", {}).items()}
            values |= {f"clients/{id}": score for id, score in record["clients"].items()}
            values |= {f"client_losses/{id}": loss for id, loss in record["losses"].items()}
            location = record["split"] + (" after the last round" if "what" in record else "")
            known = {f"{location}/{key}": value for key, value in values.items() if value is not None}
            self._track(known, record["round"])
        elif record["kind"] == "privacy":  # logged before its round's line
            self._spent = "" if record["epsilon"] is None else f", epsilon {record['epsilon']:.3g}"
            self._track({"privacy/epsilon": record["epsilon"]} if self._spent else {}, record["round"])
        elif record["kind"] == "rule":
            self.note(f"the best rule that trains nothing: {record['split']} {record['metric']} {record['mean']:.2f}")
        elif record["kind"] == "event" and record["event"] != "data changed" and not record.get("information"):
            # The others were said when the data were read, or in the plan.
            self.note(f"round {record['round']}: {record['client']}: {record['event']}: {record['reason']}")

    def _round(self, record: Mapping[str, Any]) -> None:
        loss = f"loss {record['loss']:.4f}" if "loss" in record else self._without_loss
        counted = ("failed", "refused", "dropped_out")
        missing = "".join(f", {record[key]} {key.replace('_', ' ')}" for key in counted if record.get(key))
        self.pace.trained(record.get("loss"))
        if self._progress is None:
            megabytes = (record["bytes_up"] + record["bytes_down"]) / 1e6
            left = self.pace.left()
            self._estimated = self._estimated or bool(left)
            self.note(
                f"round {record['round']}/{self._rounds}: {loss}, {megabytes:.1f} MB transferred{self._spent}{missing}"
                + (f", {left}" if left else "")
            )
        self._missing = missing
        if self._trackers is not None:
            self._trackers.round_ended(record["round"])
        self._track(
            {key: record[key] for key in ("loss", "lr", "bytes_up", "bytes_down", "padding") if key in record},
            record["round"],
        )

    @contextmanager
    def tracking(self, config: Config, folder: Path) -> Iterator[None]:
        """Show a bar over the rounds (terminals only), and start the trackers that the configuration names."""
        self._rounds = config.rounds
        self.pace = Pace(config.rounds, self._clock)
        self._stamped, self._estimated, self._spent, self._missing = True, False, "", ""
        self._without_loss = "no client trained" if not config.privacy.draws else "no loss is told"
        self.callbacks.stopped_by = ""
        try:
            with tracked(config, folder) if config.track.with_ else nullcontext() as self._trackers:
                if self.console.is_terminal and not self.console.quiet:
                    with _Bar(self) as self._progress:
                        self._bar = self._progress.add_task("", total=config.rounds)
                        yield
                else:
                    yield
        finally:
            self._progress = self._bar = self._trackers = None
            self._stamped, self.pace = False, Pace(clock=self._clock)

    def show(self, bar: Progress) -> None:
        """Bring the bar to where the run is now."""
        if self._bar is not None:
            pace, rounds = self.pace, f"{self._rounds} round" + ("" if self._rounds == 1 else "s")
            now = pace.where() or rounds + ("" if pace.loss is None else f", loss {pace.loss:.4f}")
            text = ", ".join(filter(None, [f"{now}{self._spent}{self._missing}", pace.left()]))
            full = pace.tested and not pace.where()  # only at the very end, as a full bar's clock stands still
            bar.update(self._bar, completed=pace.done if full else 0.99 * pace.done, description=text)

    def _track(self, values: Mapping[str, Any], round: int) -> None:
        if self._trackers is not None:
            self._trackers.log(values, round)


class _Bar(Progress):
    """The bar over the rounds; it looks where the run is whenever it is drawn."""

    def __init__(self, reporter: Reporter):
        columns = (
            BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
        )  # fmt: skip
        self._reporter = reporter
        super().__init__(*columns, console=reporter.console)

    def get_renderables(self) -> Any:
        self._reporter.show(self)
        yield from super().get_renderables()


class _Live:
    """Text that is requested again whenever it is drawn."""

    def __init__(self, text: Callable[[], str]):
        self._text = text

    def __rich__(self) -> Text:
        return Text(self._text())


class Watch:
    """Times one round from its making on, and what is within `with watch("part"):`."""

    def __init__(self, round: int) -> None:
        signs.round(round)
        self._parts: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        with signs.part(part):
            yield
        self._parts[part] = round(time.perf_counter() - start, 4)

    def record(self) -> dict[str, Any]:
        """Seconds of the round so far, and of each part; and the time of day."""
        signs.round_ended()
        return {"seconds": round(time.perf_counter() - self._start, 4), "parts": self._parts, "ended": time_of_day()}


class Callbacks:
    """Tells each callback in their order. What one raises ends the run.

    Attributes:
        stopped_by: which callback has asked to end the run after this round, in words; empty: none.
    """

    def __init__(self, callbacks: Sequence[Any] = ()):
        self._callbacks = tuple(callbacks)
        self._lines: list[Mapping[str, Any]] = []
        self._round = 0
        self.stopped_by = ""

    @classmethod
    def of(cls, callbacks: Sequence[Any]) -> Callbacks:
        """Of what a user has given.

        Raises:
            UserError: it is no list, or one of it has none of the hooks.
        """
        if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
            raise UserError(f"callbacks is {callbacks!r:.60}; give a list of objects")
        for each in callbacks:
            if isinstance(each, type):
                raise UserError(f"callbacks has the class {each.__name__}; give an object of it, {each.__name__}()")
            own = [name for name in dir(each) if name.startswith("on_")]
            if wrong := [name for name in own if name not in HOOKS]:
                close = did_you_mean(wrong[0], HOOKS)
                raise UserError(f"{type(each).__name__} has {wrong[0]}, which is never called{close}; hooks: {_LISTED}")
            if not own:
                raise UserError(f"{type(each).__name__} has no method that a run would call; hooks: {_LISTED}")
        return cls(callbacks)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def round(self, number: int) -> None:
        """A round begins."""
        self._round = number

    def step(self, number: int, of: int, loss: float | None) -> None:
        """An optimizer step has been made."""
        self._tell("on_step", {"round": self._round, "step": number, "steps": of, "loss": loss})

    def record(self, line: Mapping[str, Any]) -> None:
        """Keep a line of metrics.jsonl until its round has a checkpoint."""
        if self._callbacks and line["kind"] in ("round", "score"):
            self._lines.append(line)

    def round_ended(self) -> None:
        """Tell of the lines since the last time: their round is in the run folder, and would not be trained again."""
        lines, self._lines = self._lines, []
        for line in sorted(lines, key=lambda line: line["kind"] == "score"):
            self._tell("on_scores" if line["kind"] == "score" else "on_round", dict(line))

    def end(self, result: Any) -> None:
        """The run is finished."""
        self._tell("on_end", result)

    def _tell(self, hook: str, what: Any) -> None:
        for each in self._callbacks:
            if (call := getattr(each, hook, None)) is not None and call(what) is True and not self.stopped_by:
                self.stopped_by = f"the callback {type(each).__name__}.{hook} returned True"
