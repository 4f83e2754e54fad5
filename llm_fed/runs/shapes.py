"""What the files of a run folder hold: which values stand where, and in which ranges.

A folder may be damaged, or somebody else's. So whoever reads a file of one checks it here first, and everything behind
that may rely on it. Keys that are not listed are new, or a method's own, and are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any, str], None]  # raises ShapeError for (a value, where it stands)

_LARGEST = 2**63  # a whole number of 64 bits is below
_LONGEST = 200  # bytes of a client's name, as `llm_fed.tasks` takes it
_MODELS = 10**5  # of a server


class ShapeError(ValueError):
    """A file does not hold what llm_fed writes."""


def check(file: str, value: Any) -> None:
    """Refuse a value of a run folder's file: the whole of a JSON file, or a line of a JSONL file.

    Args:
        file: its name.

    Raises:
        ShapeError: what is wrong, and where in the value.
    """
    if file == "metrics.jsonl":
        _keys(kind=_text)(value, "")
        shape = _METRICS.get(value["kind"])
    elif file == "digests.jsonl":
        _keys(kind=_text)(value, "")
        shape = _DIGESTS.get(value["kind"], _refused)
    else:
        shape = _FILES.get(file)
    if shape is not None:
        shape(value, "")


def number(value: Any, where: str) -> None:
    """Any, also NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, int) and _too_large(value)):
        raise _wrong(value, where, "a number")


def finite(value: Any, where: str) -> None:
    number(value, where)
    if not math.isfinite(value):
        raise _wrong(value, where, "a finite number")


def count(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise _wrong(value, where, "a whole number of 64 bits, at least 0")


def _too_large(value: int) -> bool:
    return not -_LARGEST <= value < _LARGEST


def _score(value: Any, where: str) -> None:
    finite(value, where)
    if abs(value) > 1e9:  # a metric from elsewhere need not end at 100
        raise _wrong(value, where, "a score")


def _positive(value: Any, where: str) -> None:
    count(value, where)
    if value == 0:
        raise _wrong(value, where, "at least 1")


def _model(value: Any, where: str) -> None:
    count(value, where)
    if value >= _MODELS:
        raise _wrong(value, where, f"the number of a model, below {_MODELS}")


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong(value, where, "a text")


def _name(value: Any, where: str) -> None:
    _text(value, where)
    if not value.isprintable() or not 0 < len(value.encode()) <= _LONGEST:
        raise _wrong(value, where, "a name")


def _flag(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        raise _wrong(value, where, "true or false")


def _refused(value: Any, where: str) -> None:
    raise ShapeError(f"it is of the kind {value['kind']!r:.60}, which no run writes")


def _maybe(shape: Shape) -> Shape:
    """That, or null."""
    return lambda value, where: None if value is None else shape(value, where)


def _list(shape: Shape) -> Shape:
    def checked(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        for place, item in enumerate(value):
            shape(item, f"{where}[{place}]")

    return checked


def _by(key: Shape, shape: Shape) -> Shape:
    """A mapping whose keys are not known beforehand."""

    def checked(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "a mapping")
        for name, item in value.items():
            key(name, f"a key of {where or 'it'}")
            shape(item, _below(where, name))

    return checked


def _keys(optional: Mapping[str, Shape] | None = None, /, **needed: Shape) -> Shape:
    """A mapping with these keys, and of `optional` those that are there."""

    def checked(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "a mapping")
        for key, shape in needed.items():
            if key not in value:
                raise ShapeError(f"{where or 'it'} has no {key!r}")
            shape(value[key], _below(where, key))
        for key, shape in (optional or {}).items():
            if key in value:
                shape(value[key], _below(where, key))

    return checked


def _all(*shapes: Shape) -> Shape:
    def checked(value: Any, where: str) -> None:
        for shape in shapes:
            shape(value, where)

    return checked


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else str(key)


def _wrong(value: Any, where: str, takes: str) -> ShapeError:
    try:
        shown = repr(value)[:60]
    except ValueError:  # a number of more digits than Python writes
        shown = "a number of thousands of digits"
    return ShapeError(f"{where or 'it'} is {shown}, which is not {takes}")


_names = _list(_name)
_sums = _by(_text, _text)  # checksums by file, or by client


def _scored(value: Any, where: str) -> None:
    """Scores; where nobody could be scored there is nothing but `unscored`."""
    _keys()(value, where)
    if "mean" in value or "clients" in value or "metric" in value:
        needed = {"metric": _text, "clients": _by(_name, _score), "mean": _score, "worst_half": _score}
        _keys({"std": _score}, **needed)(value, where)  # earlier versions had no deviation
        if not value["clients"]:
            raise ShapeError(f"{_below(where, 'clients')} is empty, and there is a mean")
    _keys(
        {
            "loss": _maybe(number), "losses": _by(_name, _maybe(number)), "unscored": _names, "undefined": _names,
            "beside": _by(_name, _keys(mean=finite, clients=_by(_name, finite))),
        }
    )(value, where)  # fmt: skip


def _square(value: Any, where: str) -> None:
    """A row per client's model, and a column per client."""
    size = len(value["clients"])
    rows = [*value["scores"], *([value["base"]] if "base" in value else [])]
    if len(value["scores"]) != size or any(len(row) != size for row in rows):
        raise ShapeError(f"scores is no table of {size} rows and columns")


def _weights(value: Any, where: str) -> None:
    _keys(clients=_names, values=_list(_list(finite)))(value, where)
    rows = value["values"]
    if len(rows) != len(value["clients"]) or not all(rows):
        raise ShapeError(f"{where} has no row of weights for each client")


def _row_or_rows(value: Any, where: str) -> None:
    """The file of a row, or those of the rows of one owner, by key."""
    if not isinstance(value, str):
        _sums(value, where)


def _figures(value: Any, where: str) -> None:
    """A number, or some by factor, column or both."""
    if isinstance(value, dict):
        if not value or where.count(".") > 2:
            raise _wrong(value, where, "a number, or a few by name")
        for name, item in value.items():
            _figures(item, _below(where, str(name).replace(".", "_")))
    elif value is not None:
        number(value, where)


def _mark(value: Any, where: str) -> None:
    """A length of metrics.jsonl, and a digest."""
    if not isinstance(value, list) or len(value) != 2:
        raise _wrong(value, where, "a length and a digest")
    count(value[0], f"{where}[0]")
    _text(value[1], f"{where}[1]")


_SCORE = _all(_keys(round=count, split=_text), _scored)
_RULE = _all(_keys({"rules": _by(_name, _text), "look-up": _text}, metric=_text, clients=_by(_name, _score)), _SCORE)
_MERGE = _keys(
    {
        **dict.fromkeys(("lambda_fed", "fed_share", "a", "b", "c", "distance", "sweep", "grid"), _figures),
    },
    client=_name, rounds=_by(_text, _maybe(count)),
)  # fmt: skip
_WARNING = _keys(kind=_text, clients=_names, text=_text, figures=_by(_name, _keys()))
_METRICS: Mapping[str, Shape] = {
    "round": _keys(
        {
            **dict.fromkeys(
                ("asked", "arrived", "refused", "failed", "dropped_out", "bytes_up", "bytes_down"), count
            ),
            "loss": _maybe(number), "lr": _maybe(number), "updates": _by(_name, _list(_maybe(finite))),
        },
        round=count, padding=finite,
    ),
    "client": _keys(
        {"loss": _maybe(number), "steps": _maybe(number), "staleness": finite},
        round=count, client=_name, examples=count, bytes_up=count, bytes_down=count,
    ),
    "score": _SCORE,
    "after": _all(_keys(what=_text), _SCORE),
    "rule": _RULE,
    "event": _keys({"client": _text, "reason": _text}, round=count, event=_text),
    "drop-out": _keys(round=count, client=_name),
    "search anew": _keys(round=count),
    "server": _keys({"weights": _weights, "chosen": _by(_name, _model)}, round=count),
    "clients": _keys(dict.fromkeys(("only_tested", "left_out", "unscored"), _names)),
    "privacy": _keys({"epsilon": _maybe(number), "delta": _maybe(number), "unit": _text, "where": _text}, round=count),
    "merge": _MERGE,
}  # fmt: skip
_LINK = {"round": count, "metrics": _mark, "chain": _text}
_DIGESTS: Mapping[str, Shape] = {
    "begin": _keys(**_LINK, state=_text),
    "round": _keys(**_LINK, sent=_sums, uploads=_sums, memory=_sums, state=_text, due=_flag),
    "end": _keys(**_LINK, adapters=_sums),
}
_ENVIRONMENT = _keys(
    {
        "processes": _positive,
        "captured": _flag,
        "secret": _text,
        "padding_free": _flag,
        "fused": _text,
        "continued": _list(_keys()),
        "base": _keys(),
        "threads": _positive,
        "clients_per_pass": _positive,
    }
)
_ENDED = _keys(round=_positive, why=_text)
_FILES: Mapping[str, Shape] = {
    "timing.jsonl": _keys(
        {"ended": _text, "round": count, "passes": _by(_text, count), "why": _text},
        seconds=finite, parts=_by(_text, finite),
    ),
    "samples.jsonl": _keys({"base": _maybe(_text)}, client=_name, prompt=_text, references=_list(_text), answer=_text),
    "experts.jsonl": _keys({"std": _maybe(_by(_text, finite))}, client=_name, examples=count, mean=_by(_text, finite)),
    "cross.json": _all(
        _keys(
            {
                "unscored": _names, "limit": _maybe(count), "base": _list(_maybe(_score)), "of": count,
                "warnings": _list(_WARNING), "missing": _text,
            },
            metric=_text, split=_text, clients=_names, scores=_list(_list(_maybe(_score))),
        ),
        _square,
    ),
    "warnings.json": _keys({"unchecked": _list(_text)}, warnings=_list(_WARNING)),
    "test_scores.jsonl": _keys(dict.fromkeys(("own", "base", "rule"), _list(_score)), client=_name),
    "summary.json": _keys(
        {
            "rounds": count, "ended": _ENDED, "base": _SCORE, "rule": _RULE, "notes": _list(_text), "adapters": _text,
            "needs": _by(_text, _maybe(count)), "examples": _by(_name, _by(_text, count)),
            **dict.fromkeys(("only_tested", "left_out", "unscored"), _names),
            "warnings": _list(_WARNING), "unchecked": _list(_text),
        },
        round=count, method=_text, scores=_scored,
    ),
    "environment.json": _ENVIRONMENT,
    "splits.json": _keys(
        files=_list(_text), checksums=_list(count), codes=_text, digests=_text, splits=_text, clients=_list(_text),
        changes=_list(_keys(round=count, files=_by(_text, _text))),
    ),
    "manifest.json": _keys(round=count, sha256=_text, rows=_by(_text, _row_or_rows)),
    "ended.json": _ENDED,
    "continued.json": _keys(round=_positive),
    "start.json": _keys(sha256=_text),
    "delivered.json": _keys(files=_sums),
    "inputs.json": _by(_text, _sums),
}  # fmt: skip
