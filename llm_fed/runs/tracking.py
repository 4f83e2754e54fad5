"""What a user sees while a run goes on: a progress bar on a terminal, plain lines in a log file, and experiment
trackers; and how long the parts of a round took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status

from llm_fed.basics import signs
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, did_you_mean, printable
from llm_fed.basics.terminal import Terminal
from llm_fed.runs.records import time_of_day
from llm_fed.runs.trackers import Trackers
from llm_fed.settings.config import Config

# on_step: {"round", "step", "steps", "loss"} after an optimizer step of a pass over clients; on_round, on_scores: the
# line of metrics.jsonl on a round, and on scores; on_end: the result.
HOOKS = ("on_step", "on_round", "on_scores", "on_end")
_LISTED = ", ".join(HOOKS)


_WORDS = {  # parts of a round, and what is said of them
    "broadcast": "preparing the messages",
    "local": "training at the clients",
    "collect": "collecting the answers",
    "server": "the server's step",
    "evaluate": "scoring",
    "checkpoint": "writing the checkpoint",
    "test": "testing",
    signs.CROSS: "answering for the cross table",
}


@dataclass
class Pace:
    """Where a run is, and how long its rounds will take by those that this session has trained; nothing is known before
    the first of them, or of what comes after the last round. Other threads may read it at any time."""

    rounds: int = 0
    number: int = 0  # of the round; 0 before the first
    inside: bool = False  # a round
    done: int = 0  # the last round that has been trained
    loss: float | None = None  # the last one that is known
    parts: tuple[str, ...] = ()  # of the work, the innermost last; a tuple, as it may be read while it is changed
    step: str = ""  # of this part
    answers: int = 0  # of this part
    trained: int = 0  # rounds of this session
    began: float = 0.0  # when the first of them began
    last: float = 0.0  # when the last of them had been trained

    def where(self) -> str:
        """What is being done, in words."""
        part = self.parts[-1] if self.parts else ""
        words = [f"round {self.number} of {self.rounds}"] if self.inside else []
        if part and not (self.step and part == "local"):
            words.append(_WORDS.get(part, part))
        if self.answers:
            words.append(f"{self.answers} answers")
        if self.step:
            words.append(self.step + ("" if self.loss is None else f", loss {self.loss:.3f}"))
        return ", ".join(words)

    def left(self, now: float) -> str:
        """How long the rounds will take, in words: `about 14 min left`; empty where that is not known, or none is left.
        Of a round that takes longer than those before it says so, and grows."""
        to_come = self.rounds - self.done
        if not self.trained or to_come <= 0:
            return ""
        usual, waited = (self.last - self.began) / self.trained, now - self.last
        expected = max(usual, (now - self.began) / (self.trained + 1))
        late = waited - usual
        left = f"about {duration(max(expected * to_come - waited, late))} left"
        return left + (f"; {duration(late)} later than expected" if late > 1 else "")


def duration(seconds: float) -> str:
    """In words, with the precision of an estimate: `40 s`, `14 min`, `3.5 h`, `2.1 days`."""
    if seconds < 9.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 90:
        return f"{10 * round(seconds / 10)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


@dataclass
class Callbacks:
    """Tells each callback in their order. What one raises ends the run."""

    told: Sequence[object] = ()  # the callbacks
    lines: list[Mapping[str, Any]] = field(default_factory=list)  # of metrics.jsonl, whose round has no checkpoint yet
    stopped_by: str = ""  # which callback has asked to end the run after this round, in words; empty: none

    @classmethod
    def of(cls, callbacks: Sequence[Any]) -> Callbacks:
        """Of what a user has given. UserError: it is no list, or one of it has none of the hooks."""
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

    def round_ended(self) -> None:
        """Tell of the lines since the last time: their round is in the run folder, and would not be trained again."""
        lines, self.lines = self.lines, []
        for line in sorted(lines, key=lambda line: line["kind"] == "score"):
            self.tell("on_scores" if line["kind"] == "score" else "on_round", dict(line))

    def tell(self, hook: str, what: Any) -> None:
        """Call a hook of those that have it."""
        for each in self.told:
            if (call := getattr(each, hook, None)) is not None and call(what) is True and not self.stopped_by:
                self.stopped_by = f"the callback {type(each).__name__}.{hook} returned True"


@dataclass(eq=False, repr=False)
class Reporter(signs.Listener):
    """Shows a run's records as they come, and that it goes on while none comes.

    Args:
        console: where to; standard error by default, so that `--json` has standard output for itself.
        interval: in a log file, the most seconds without a line while work goes on.
        callbacks: are told of what happens.
        clock: by which the time that is left is estimated.
    """

    console: Console = field(default_factory=partial(Terminal, stderr=True))
    interval: float = 30.0
    callbacks: Callbacks = field(default_factory=Callbacks)
    clock: Callable[[], float] = time.monotonic
    pace: Pace = field(default_factory=Pace, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)
    _printed: float = field(default_factory=time.monotonic, init=False)  # when the last line was printed
    _working = False
    _stamped = False  # whether lines begin with the time
    _status: Status | None = field(default=None, init=False)
    _bar: Progress | None = field(default=None, init=False)
    _spent = ""
    _without_loss = "no client trained"
    _said: set[str] = field(default_factory=set, init=False)
    _trackers: Trackers | None = field(default=None, init=False)
    _announced: dict[str, str] = field(default_factory=dict, init=False)

    def note(self, text: str, *, stamped: bool = False) -> None:
        """One line; with the time of day, if it is `stamped`, or a run has begun to train."""
        with self._lock:
            stamp = time.strftime("%H:%M:%S ") if (stamped or self._stamped) and not self.console.is_terminal else ""
            self.console.print(stamp + printable(text).replace("\n", " "))
            self._printed = time.monotonic()

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
        self.pace.number = self.pace.done = round - 1
        if self._trackers is not None:
            self._trackers.resumed(round - 1)

    def ended_early(self, round: int, why: str) -> None:
        """The run has ended before its last round; no more are expected."""
        self.note(f"ended after round {round} of {self.pace.rounds}: {why}")
        self.pace.rounds = round

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, no silence lasts longer than the interval: on a terminal something moves, in a log file lines come.

        Runs that are trained within another one's are part of its work.
        """
        if self._working or (self.console.quiet and not self.callbacks.told):
            yield
            return
        self._working, self._printed, stop = True, time.monotonic(), threading.Event()
        thread = threading.Thread(target=self._beat, args=[stop], name="heartbeat", daemon=True)
        if not self.console.is_terminal and not self.console.quiet:
            thread.start()
        before = signs.listener.set(self)
        try:
            yield
        finally:
            signs.listener.reset(before)
            stop.set()
            if thread.is_alive():
                thread.join()
            self._working = False

    def _beat(self, stop: threading.Event) -> None:
        """A line whenever none has come for the interval."""
        while not stop.wait(self.interval / 30):
            with self._lock:
                if time.monotonic() - self._printed >= self.interval and not stop.is_set():
                    self.note(self._with_left(self.pace.where() or "still at work"), stamped=True)

    def _with_left(self, words: str) -> str:
        left = self.pace.left(self.clock())
        return f"{words}, {left}" if left else words

    def round(self, number: int) -> None:
        self.pace.number, self.pace.inside = number, True
        if not self.pace.trained:
            self.pace.began = self.clock()

    def round_ended(self) -> None:
        self.pace.inside = False

    def begin(self, part: str) -> None:
        self.pace.parts, self.pace.step, self.pace.answers = (*self.pace.parts, part), "", 0
        if self.console.is_terminal and self._bar is None and self._status is None:
            self._status = self.console.status(self.pace.where())
            self._status.start()

    def end(self, part: str) -> None:
        self.pace.parts, self.pace.step, self.pace.answers = self.pace.parts[:-1], "", 0
        if self._status is not None:
            self._status.stop()
            self._status = None

    def step(self, number: int, of: int, loss: float | None) -> None:
        pace = self.pace
        pace.step, pace.loss = f"step {number} of {of}", pace.loss if loss is None else loss
        if pace.number:
            self.callbacks.tell("on_step", {"round": pace.number, "step": number, "steps": of, "loss": loss})
        if self._trackers is not None:
            self._trackers.step(loss)

    def answered(self, amount: int) -> None:
        self.pace.step, self.pace.answers = "", self.pace.answers + amount
        if self._status is not None:
            self._status.update(self.pace.where())

    def record(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, shown where it tells a user something."""
        if self.callbacks.told and record["kind"] in ("round", "score"):
            self.callbacks.lines.append(record)
        if record["kind"] == "round":
            self._round(record)
        elif record["kind"] in ("score", "after"):
            self._scores(record)
        elif record["kind"] == "privacy":  # logged before its round's line
            self._spent = "" if record["epsilon"] is None else f", epsilon {record['epsilon']:.3g}"
            if self._trackers is not None and self._spent:
                self._trackers.log({"privacy/epsilon": record["epsilon"]}, record["round"])
        elif record["kind"] == "rule":
            self.note(f"the best rule that trains nothing: {record['split']} {record['metric']} {record['mean']:.2f}")
        elif record["kind"] == "event" and record["event"] != "data changed" and not record.get("information"):
            # The others were said when the data were read, or in the plan.
            self.note(f"round {record['round']}: {record['client']}: {record['event']}: {record['reason']}")

    def _round(self, record: Mapping[str, Any]) -> None:
        """The round is trained, and may still be scored and saved."""
        pace = self.pace
        pace.done, pace.loss, pace.last, pace.trained = pace.number, record.get("loss"), self.clock(), pace.trained + 1
        if self._bar is None:
            loss = f"loss {record['loss']:.4f}" if "loss" in record else self._without_loss
            megabytes = (record["bytes_up"] + record["bytes_down"]) / 1e6
            said = f"round {record['round']}/{self.pace.rounds}: {loss}, {megabytes:.1f} MB transferred{self._spent}"
            for key in ("failed", "refused", "dropped_out"):
                said += f", {record[key]} {key.replace('_', ' ')}" if record.get(key) else ""
            self.note(self._with_left(said))
        if self._trackers is not None:
            self._trackers.round_ended(record["round"])
            keys = ("loss", "lr", "bytes_up", "bytes_down", "padding")
            self._trackers.log({key: record[key] for key in keys if key in record}, record["round"])

    def _scores(self, record: Mapping[str, Any]) -> None:
        beside = {name: of["mean"] for name, of in record.get("beside", {}).items()}
        alone = "" if record["round"] else " (the base alone)"
        alone += f" and {record['what']}" if "what" in record else ""
        said = f"round {record['round']}{alone}: {record['split']} {record['metric']} {record['mean']:.2f}"
        if len(record["clients"]) > 1:
            said += f" (std {record['std']:.2f} over clients, worst half {record['worst_half']:.2f})"
        said += "" if record["loss"] is None else f", loss {record['loss']:.4f}"
        self.note(said + "".join(f", {name} {mean:.4g}" for name, mean in beside.items()))
        if self._trackers is None:
            return
        values = {key: record[key] for key in ("mean", "std", "worst_half", "loss")} | beside
        values |= {f"clients/{id}": score for id, score in record["clients"].items()}
        values |= {f"client_losses/{id}": loss for id, loss in record["losses"].items()}
        split = record["split"] + (" after the last round" if "what" in record else "")
        known = {f"{split}/{key}": value for key, value in values.items() if value is not None}
        self._trackers.log(known, record["round"])

    @contextmanager
    def tracking(self, config: Config, folder: Path) -> Iterator[None]:
        """Show a bar over the rounds (terminals only), and start the trackers that the configuration names."""
        self.pace = Pace(config.rounds)
        self._stamped, self._spent, self.callbacks.stopped_by = True, "", ""
        self._without_loss = "no client trained" if not config.privacy.draws else "no loss is told"
        moves = self.console.is_terminal and not self.console.quiet
        try:
            with (
                closing(Trackers(config, folder)) if config.track.with_ else nullcontext() as self._trackers,
                _Bar(self) if moves else nullcontext() as self._bar,
            ):
                yield
        finally:
            self._bar = self._trackers = None
            self._stamped, self.pace = False, Pace()

    def now(self) -> str:
        """Where the run is, for its bar."""
        loss = "" if self.pace.loss is None else f", loss {self.pace.loss:.4f}"
        return self._with_left((self.pace.where() or f"{self.pace.rounds} rounds{loss}") + self._spent)


class _Bar(Progress):
    """The bar over the rounds, and the end behind them; it looks where the run is whenever it is drawn."""

    def __init__(self, reporter: Reporter):
        self._reporter = reporter
        text = TextColumn("{task.description}", markup=False)
        super().__init__(BarColumn(bar_width=20), TimeElapsedColumn(), text, console=reporter.console)
        self._task = self.add_task("", total=reporter.pace.rounds + 1)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.task_ids:
            self.update(task, completed=self._reporter.pace.done, description=self._reporter.now())
        yield from super().get_renderables()


@dataclass
class Watch:
    """Times one round from its making on, and what is within `with watch("part"):`."""

    parts: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=lambda: time.perf_counter())

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        with signs.part(part):
            yield
        self.parts[part] = round(time.perf_counter() - start, 4)

    def record(self) -> dict[str, Json]:
        """Seconds of the round so far, and of each part; and the time of day."""
        return {"seconds": round(time.perf_counter() - self.start, 4), "parts": self.parts, "ended": time_of_day()}
