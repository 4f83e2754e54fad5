"""Metrics from outside llm_fed: a function, or an object of the library evaluate, that is called as evaluate's are.

`evaluate:NAME` is a metric of this library, by its name on the Hub or a local folder, and `evaluate:NAME:KEY` one of
the numbers that it returns, such as `evaluate:sacrebleu:score`. Its script is run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from llm_fed.basics.errors import UserError, one_line
from llm_fed.scoring.metrics import Prediction, Reference


def check(key: str, name: str, thing: Any) -> None:
    """Refuse what cannot be called as a metric. UserError: what it is, and what it must be."""
    if isinstance(thing, type) or not (callable(thing) or callable(getattr(thing, "compute", None))):
        raise UserError(
            f"{key}={name!r} is {thing!r:.60}; it must be a function metric(*, predictions, references), or an object "
            "with such a method compute, as evaluate.load returns"
        )


# Metrics of the library that are at most 1 and whose descriptions do not say so.
_UP_TO_ONE = ("bleu", "google_bleu", "meteor", "rouge", "roc_auc")
_SAYS_ONE = re.compile(
    r"maximum possible value is 1\b|(?:between|from) 0(?:\.0)? (?:and|to) 1\b|\[0, ?1\]", re.IGNORECASE
)
_SAYS_LOWER = re.compile(r"(?:lower|smaller)\b[^.]{0,60}\bbetter|best value (?:is|being) 0", re.IGNORECASE)


class OfEvaluate:
    """A metric of the library evaluate, 0 to 100; `key`: the number that counts, of several. UserError: there is none,
    its script cannot run here, or it is an error, of which less is better."""

    def __init__(self, path: str, key: str):
        import evaluate  # which imports most of transformers

        self.path, self.key = path, key
        folder = os.path.expanduser(path)
        try:
            self._module = evaluate.load(folder if os.path.exists(folder) else path, keep_in_memory=True)
        except Exception as error:  # whatever its script raises
            raise UserError(
                f"eval.metric=evaluate:{path}: the library evaluate cannot load it: {one_line(str(error))}"
            ) from error
        said = " ".join(f"{self._module.description} {self._module.inputs_description}".split())
        if _SAYS_LOWER.search(said):
            raise UserError(f"eval.metric=evaluate:{path} is an error, of which less is better; choose a score")
        self.scale = 100 if _SAYS_ONE.search(said) or self._module.name in _UP_TO_ONE else 1

    def compute(self, *, predictions: Sequence[Prediction], references: Sequence[Reference]) -> float | list[float]:
        """0 to 100, of all examples or of each. UserError: it takes no such answers, or returns several numbers and no
        key says which counts."""
        try:
            result = self._module.compute(predictions=predictions, references=references)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"eval.metric=evaluate:{self.path} fails on answers such as {predictions[0]!r:.40}: "
                f"{one_line(str(error))}"
            ) from error
        values = _values(f"evaluate:{self.path}:{self.key}", result, len(references))
        return [self.scale * value for value in values] if len(values) > 1 else self.scale * values[0]


@cache
def of_evaluate(name: str) -> OfEvaluate:
    """What `evaluate:NAME` or `evaluate:NAME:KEY` stands for; errors as of `OfEvaluate`."""
    _, _, path = name.partition(":")
    path, _, key = path.partition(":")
    return OfEvaluate(path, key or os.path.basename(os.path.normpath(path)))


def compute(name: str, thing: Any, predictions: Sequence[Prediction], references: Sequence[Reference]) -> float:
    """The score (0-100) of N predictions by a metric from outside; NaN where it is not defined. `thing`: a function, or
    an object with a method `compute`. It is given two lists of N as `predictions=` and `references=`: texts, and the
    right text of each, or lists of texts where an example has several; of labels their indices. It returns 0 to 100 for
    all or for each, or a dict with one such value; None or NaN where it is not defined, which counts in no mean.
    UserError: it returns something else. What the metric itself raises is passed on."""
    wanted: list[Any] = [each if isinstance(each, int | float) else list(each) for each in references]
    if all(isinstance(each, list) and len(each) == 1 for each in wanted):
        wanted = [each[0] for each in wanted]
    call = thing.compute if callable(getattr(thing, "compute", None)) else thing
    result = call(predictions=list(predictions), references=wanted)
    values = [value for value in _values(name, result, len(wanted)) if not math.isnan(value)]
    if wrong := [value for value in values if not 0 <= value <= 100]:
        raise UserError(f"the metric {name} returned {wrong[0]:g}; it must return numbers from 0 to 100")
    return fmean(values) if values else math.nan


def _values(name: str, result: Any, number: int) -> list[float]:
    """The one number of a result, or the one of each of so many examples."""
    if isinstance(result, Mapping):
        own = name.rpartition(":")[2]
        if len(result) != 1 and own not in result:
            raise UserError(
                f"the metric {name} returned a dict with {', '.join(map(str, result)) or 'nothing'}; it must return "
                f"one number, or a dict in which one has the key {own!r}"
            )
        return _values(name, result[own] if own in result else next(iter(result.values())), number)
    plain = result.tolist() if callable(getattr(result, "tolist", None)) else result
    listed = isinstance(plain, Sequence) and not isinstance(plain, str)
    values = list(plain) if listed else [plain]
    if listed and len(values) != number:
        raise UserError(f"the metric {name} returned {len(values)} numbers for {number} examples; return one for each")
    try:
        return [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the metric {name} returned {result!r:.60}; it must return a number from 0 to 100, or a list of them"
        ) from error
