"""What one cell of a row holds, as text: the same text whatever file it comes from."""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal

from llm_fed.basics.errors import UserError
from llm_fed.rows import Cell, Row

_UNSEEN = re.compile("[\u00ad\u200b\u2060\ufeff]")  # characters without width
_SEEN = re.compile("[^\\s\u00ad\u200b-\u200f\u2060\ufeff]")


def held(row: Row, column: str) -> Cell:
    """What a row holds in a column, or in a field within one (`ticket.question`); UserError where it has none."""
    try:
        return row.values[column] if column in row.values else _within(row.values, column)
    except KeyError:
        raise UserError(f"{row.where}: the column {column!r} is missing; every row needs it") from None


def _within(values: Mapping[str, Cell], column: str) -> Cell:
    first, dot, rest = column.partition(".")
    inner = parsed(values[first]) if dot else None
    if not isinstance(inner, dict):
        raise KeyError(column)
    return inner[rest] if rest in inner else _within(inner, rest)


def text_of(row: Row, column: str) -> str:
    """The text in one column; UserError where there is none."""
    return as_text(held(row, column), row.where, column)


def number_of(row: Row, column: str) -> float:
    """The number in one column; UserError where there is none, or it is not finite."""
    value, number = held(row, column), math.nan
    with suppress(ValueError):
        number = float(value) if isinstance(value, str | int | float | Decimal) else math.nan
    if not math.isfinite(number):
        raise UserError(
            f"{row.where}: column {column!r} holds no finite number, but {value!r:.40}; correct it, or drop the row"
        )
    return number


def optional(row: Row, column: str | None) -> str:
    """The text in a column that may be absent or empty; then ""."""
    if column is None:
        return ""
    value = value_of(row, column)
    return "" if is_empty(value) else as_text(value, row.where, column)


def value_of(row: Row, column: str) -> Cell:
    """As `held`, but None where it has none."""
    try:
        return held(row, column)
    except UserError:
        return None


def texts_of(value: Cell, where: str, column: str) -> tuple[str, ...]:
    """One text, or those in a list; UserError where there is none."""
    if not isinstance(value, list):
        return (as_text(value, where, column),)
    if not value:
        raise UserError(f"{where}: the list in column {column!r} is empty; fill it, or drop the row")
    return tuple(as_text(each, where, column) for each in value)


def as_text(value: Cell, where: str, column: str) -> str:
    """A value as text; UserError where it is empty, or no text. A number is the same text whether its column is one of
    whole numbers or not; booleans are written as in JSON, and dates as in ISO 8601."""
    if isinstance(value, str):
        if not _SEEN.search(value):
            raise UserError(f"{where}: column {column!r} is empty; fill it, or drop the row")
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return str(int(value)) if value == int(value) else json.dumps(float(value))
    if isinstance(value, datetime) and value.time() == time():
        value = value.date()  # as Excel knows no dates without a time
    if isinstance(value, date | time):
        return value.isoformat()
    kind = "nothing" if is_empty(value) else "infinity" if value in (math.inf, -math.inf) else type(value).__name__
    raise UserError(f"{where}: column {column!r} holds {kind}, not text; convert it, or drop the row")


def as_seen(text: str) -> str:
    """The text such that two that look alike are equal: accents and spaces in one form, nothing without width."""
    return re.sub("[\u00a0\u202f]", " ", _UNSEEN.sub("", unicodedata.normalize("NFC", text))).strip()


def is_empty(value: Cell) -> bool:
    """Whether a cell holds nothing; a number that is missing is often NaN."""
    if isinstance(value, str):
        return not _SEEN.search(value)
    return (
        value is None
        or (isinstance(value, list | dict) and not value)
        or (isinstance(value, float) and math.isnan(value))
        or (isinstance(value, Decimal) and value.is_nan())
    )


def parsed(value: Cell) -> Cell:
    """A list or an object that a cell of text holds, written as JSON or as Python writes it; else the value itself."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            inner = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return inner if isinstance(inner, list | dict) else value
    return value
