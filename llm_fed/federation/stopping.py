"""Stop rules: a run ends before its last round once its validation scores have not improved for a while.

What a rule says follows from the scores alone, which metrics.jsonl holds up to the newest checkpoint. So a run that is
killed and continued ends after the same round as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llm_fed.settings.config import StopConfig

UNSCORED = (
    "stop.patience={} waits for scores of validation examples, but nobody has any; set task.validation=0.1, or leave "
    "stop.patience out"
)


def reason(lines: Sequence[Mapping[str, Any]], stop: StopConfig, since: int = 0) -> str:
    """Why a run ends after the last of these scored rounds; empty where it goes on.

    As in early stopping of other libraries, only a value that differs by more than `stop.min_delta` from the best one
    so far becomes the best one.

    Args:
        lines: the lines of scores, in the order of their rounds.
        since: a round from which the user let the run go on; only scored rounds after it are counted.
    """
    if stop.patience is None:
        return ""
    best, round, waited = -math.inf, 0, 0
    for line in lines:
        value = float(line["mean"])
        if value > best + stop.min_delta or not round:
            best, round, waited = value, line["round"], 0
        elif line["round"] > since:
            waited += 1
    if waited < stop.patience:
        return ""
    than = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
    return (
        f"stop.patience={stop.patience}: the validation score of round {round} was not improved upon{than} in "
        f"{waited} scored round{'' if waited == 1 else 's'}"
    )
