"""Callbacks: what a user's own code is told of a run while it goes on, and how it ends the run.

A callback is any object with some of the methods of `HOOKS`. Each is given one dict, or at the end the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llm_fed.basics.errors import UserError, did_you_mean

# on_step: {"round", "step", "steps", "loss"} after an optimizer step of a pass over clients; on_round, on_scores: the
# line of metrics.jsonl on a round, and on scores; on_end: the result.
HOOKS = ("on_step", "on_round", "on_scores", "on_end")


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


_LISTED = ", ".join(HOOKS)
