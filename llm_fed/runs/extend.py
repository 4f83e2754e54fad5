"""What may change when a run is continued, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fed.basics.errors import UserError
from llm_fed.settings.config import Config

if TYPE_CHECKING:
    from llm_fed.method import Method

# Which scores there are; with `eval.of_last` also which of them count in the search for the best round.
COUNTED_BY = ("rounds", "eval.every")
# What else may change in the middle of a run.
_ALSO = ("eval.batch_size", "eval.select")
STOPS = ("stop.patience", "stop.min_delta")
MAY_CHANGE = (*COUNTED_BY, *_ALSO, *STOPS)
# Of these the results of a finished run depend, whatever it has stored of its rounds.
_DECIDES_RESULT = ("rounds", "eval.select")

Changes = Mapping[str, tuple[Any, Any]]  # by dotted key, the values before and now
Ended = Mapping[str, Any] | None  # what ended.json holds


def rounds_done(folder: Path, *, parents: bool = True) -> int:
    """The newest round of which a run folder has a checkpoint, or that of a parent in it; 0: none."""
    checkpoints = (folder.rglob if parents else folder.glob)("checkpoints/round-*")
    return max((int(path.name.partition("-")[2]) for path in checkpoints), default=0)


def by_rule(ended: Ended) -> bool:
    """Whether the run's own stop rule has ended it, rather than the user."""
    return ended is not None and str(ended["why"]).startswith("stop.")


def reopens(changes: Changes, ended: Ended = None) -> bool:
    """Whether a finished run with these changes is no longer finished."""
    return any(key in changes for key in _DECIDES_RESULT) or goes_on(changes, ended)


def goes_on(changes: Changes, ended: Ended) -> bool:
    """Whether these changes decide anew when a run ends that has ended before its last round."""
    return ended is not None and ("rounds" in changes or (by_rule(ended) and any(key in changes for key in STOPS)))


def check(folder: Path, changes: Changes, ended: Ended = None, of_last: int | None = None) -> None:
    """Refuse to continue a run with such changes as no continued run could have. UserError: what does not work, and
    what does. `ended`: how the run has ended before its last round, if it has. `of_last`: `eval.of_last`."""
    done = rounds_done(folder)
    if "rounds" in changes and changes["rounds"][1] < done:
        now = changes["rounds"][1]
        raise UserError(
            f"{folder} has trained {done} rounds, and rounds={now} is fewer: a run cannot go back. Give rounds={done} "
            f"or more, or train {now} rounds into another --out."
        )
    if of_last is not None and any(key in changes for key in COUNTED_BY):
        raise UserError(
            f"{folder} has eval.of_last={of_last}, which counts back from the last round, so rounds and eval.every may "
            "not change; give another --out"
        )
    if not (folder / "summary.json").exists() or reopens(changes, ended):
        return
    if other := [f"{key}: {changes[key][0]!r} -> {changes[key][1]!r}" for key in STOPS if key in changes]:
        raise UserError(
            f"{folder} is complete, so this change has no effect: {'; '.join(other)}. With more rounds, the run "
            "continues with the change."
        )


def check_together(folder: Path, reached: int, together: int, rounds: int) -> None:
    """Refuse to continue a run that has trained more rounds together than it is to have now (`Method.together`).
    UserError: it has."""
    if reached > together:
        raise UserError(
            f"{folder} has trained {reached} rounds together, and of rounds={rounds} only {together} are trained so: a "
            "run cannot go back. Give more rounds, or another --out."
        )


def notes(before: Config, now: Config, folder: Path, method: Method) -> list[str]:
    """What a user should know of a run that is continued with another configuration, a sentence or two each. `folder`:
    the run's, as the earlier command left it."""
    if before.rounds == now.rounds:
        return []
    done = rounds_done(folder)
    had = f"this run had {before.rounds} rounds" + ("" if done >= before.rounds else f", of which {done} are done,")
    sentences = [f"{had} and continues to {now.rounds}"]
    which = ["local.lr_end"] * (now.local.lr != now.local.lr_end) + [str(now.method["name"])] * method.by_rounds
    if which and 0 < rounds_done(folder, parents=False) < now.rounds:  # a parent says its own
        sentences.append(
            f"what {' and '.join(which)} made of the number of rounds until here was for {before.rounds}, so the "
            f"results of a run of {now.rounds} rounds from the start would differ"
        )
    return sentences
