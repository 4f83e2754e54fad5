"""Settings: each field of a configuration or a method declares its type and range, and one function checks both.

    num_models: PositiveInt = 8
    mixing: Annotated[float, Above(0), AtMost(1)] = 0.4
    wait_for: PositiveInt | None = None
    wait: Literal["none", "deadline", "first_n"] = "none"

Every float must be finite. A string in `Annotated` is appended to the error message of a refused value: a unit, or what
null means. A check that relates two fields is code in their class.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from llm_fed.basics.documents import Spelled, plain
from llm_fed.basics.errors import UserError, require
from llm_fed.basics.spelling import Word, names


@dataclasses.dataclass(frozen=True)
class _Bound:
    limit: float
    words: ClassVar[str]
    compare: ClassVar[Callable[[Any, Any], bool]]

    def holds(self, value: float) -> bool:
        return type(self).compare(value, self.limit)

    def __str__(self) -> str:
        return f"{self.words} {self.limit}"


class AtLeast(_Bound):
    words, compare = "at least", operator.ge


class Above(_Bound):
    words, compare = "above", operator.gt


class AtMost(_Bound):
    words, compare = "at most", operator.le


class Below(_Bound):
    words, compare = "below", operator.lt


@dataclasses.dataclass(frozen=True)
class Finite:
    def holds(self, value: float) -> bool:
        return math.isfinite(value)

    def __str__(self) -> str:
        return "finite"


@dataclasses.dataclass(frozen=True)
class NonEmpty:
    """A list or text that holds something: `what`."""

    what: str

    def holds(self, value: Sequence[Any]) -> bool:
        return len(value) > 0

    def __str__(self) -> str:
        return self.what


_WITH_COMMA = re.compile(r"[-+]?\d*,\d+(?:e[-+]?\d+)?", re.IGNORECASE)  # a number as it is written in German
_LARGEST = 2**63  # whole numbers have 64 bits everywhere else, too

PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    try:
        types = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise UserError(
            f"{kind.__module__}.{kind.__qualname__}: the type of a field cannot be read, as {error}; import what it "
            "names, and not only under `if TYPE_CHECKING`"
        ) from error
    return {field.name: types[field.name] for field in dataclasses.fields(kind)}


def hints(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name, with their marks; UserError where its module lacks a type."""
    return _hints(kind)  # type: ignore[arg-type]  # a class can be hashed, whatever its instances can


def hint_of(kind: type, key: Sequence[str]) -> Any:
    """The type of a field of a dataclass, or of one of its sections; None where it has no such field."""
    hint = {key_of(name): hint for name, hint in hints(kind).items()}.get(key[0])
    if len(key) == 1:
        return hint
    section = section_of(hint)
    return hint_of(section, key[1:]) if section else None


def section_of(hint: Any) -> type | None:
    """The dataclass that a field holds, if it is a section."""
    kinds = [kind for kind, _ in members_of(hint)]
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def key_of(name: str) -> str:
    """The key of a field in a file: `with` is a word of Python, so the field is `with_`."""
    return name.removesuffix("_")


def check_fields(settings: Any, where: str) -> None:
    """UserError for the first value of a dataclass that does not have the declared type and range, and what it must be.
    `where` is the prefix of field names in messages, such as `method.` in `method.wait_for`."""
    for name, hint in hints(type(settings)).items():
        value, key = getattr(settings, name), f"{where}{key_of(name)}"
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{key}.")
        else:
            coerce(value, hint, key)


Member = tuple[Any, tuple[Any, ...]]  # a type that is no union, and its marks


def members_of(hint: Any, marks: tuple[Any, ...] = ()) -> list[Member]:
    """The types that a value of this type may have, each with its own marks and those of what it stands in."""
    if get_origin(hint) is Annotated:
        kind, *own = get_args(hint)
        return members_of(kind, (*own, *marks))
    if get_origin(hint) in (Union, UnionType):
        return [member for part in get_args(hint) for member in members_of(part, marks)]
    return [(hint, () if hint is NoneType else marks)]


def coerce(value: Any, hint: Any, key: str) -> Any:
    """`value` converted to the field's type: a whole number to a float, a list to a tuple. What is `Spelled` is taken
    as it is spelled where the type is a text. UserError where it is of another type, or out of range."""
    members = members_of(hint)
    try:
        return _taken(value, members)
    except _WrongType:
        takes, given, how = sorted({_name(kind) for kind, _ in members}), plain(value), ""
        if isinstance(value, Word) and any(get_origin(kind) is tuple for kind, _ in members):
            given, how = value.text, ", as in [a,b], where an item with a comma stands in quotes"
        if "float" in takes and isinstance(given, str) and _WITH_COMMA.fullmatch(given):
            how = f"; type {key}={given.replace(',', '.')}"
        raise UserError(f"{key} is {given!r} ({type(given).__name__}); it takes {' or '.join(takes)}{how}") from None
    except _TooLargeNumber:
        raise UserError(f"{key} is a whole number of more than 64 bits; give a smaller one") from None
    except _OutOfRange as refused:
        kinds = [kind for kind, _ in members if kind is not NoneType]
        if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
            require(key, value.text or "" if isinstance(value, Spelled) else value, get_args(kinds[0]))
        raise UserError(f"{key} is {refused.value!r}; it must be {range_of(hint)}") from None


def is_text(hint: Any) -> bool:
    """Whether a value of this type may be a text, or a list of texts, that are not among a few choices."""
    return any(
        kind is str or (get_origin(kind) is tuple and is_text(get_args(kind)[0])) for kind, _ in members_of(hint)
    )


PLAIN = "bool, int, float, str, Literal[...], tuple[int, ...], tuple[str, ...], None"  # what a configuration can give


def takes_plain(hint: Any) -> bool:
    """Whether a type is made of those in PLAIN alone."""
    return all(
        kind in (bool, int, float, str, NoneType)
        or get_origin(kind) is Literal
        or (get_origin(kind) is tuple and get_args(kind)[1:] == (...,) and takes_plain(get_args(kind)[0]))
        for kind, _ in members_of(hint)
    )


def range_of(hint: Any) -> str:
    """The range of this type in words; empty if any value is allowed."""
    members = members_of(hint)
    # Of a list of names or one name, say, the range is said once.
    texts = list(dict.fromkeys(text for kind, marks in members for text in _texts(kind, marks)))
    if not texts:
        return ""
    text = ", ".join(texts[:-1]) + (" or " if len(texts) > 1 else "") + texts[-1]
    note = next((mark for _, marks in members for mark in marks if isinstance(mark, str)), "")
    if any(kind is NoneType for kind, _ in members):
        return f"{text}, or null {note}".rstrip()
    return f"{text}, {note}" if note else text


def _texts(kind: Any, marks: tuple[Any, ...]) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    each = range_of(get_args(kind)[0]) if get_origin(kind) is tuple else ""
    text = ", ".join(filter(None, [" and ".join(map(str, _bounds(kind, marks))), each and f"each {each}"]))
    return [text] if text else []


class _WrongType(Exception):
    pass


class _TooLargeNumber(Exception):
    pass


class _OutOfRange(Exception):
    def __init__(self, value: Any):
        self.value = value


def _taken(value: Any, members: list[Member]) -> Any:
    """`value` as the first member that takes it has it; what may be a text or something else is the latter."""
    if isinstance(value, Spelled):
        if value.value is None and any(kind is NoneType for kind, _ in members):
            return None
        members = sorted(members, key=lambda member: member[0] is str)
    refused: Exception = _WrongType()
    for kind, marks in members:
        if kind is str and isinstance(value, Spelled) and isinstance(refused, _OutOfRange):
            break  # a list that is refused for being empty is not the text "[]"
        try:
            converted = _converted(value, kind)
            if all(bound.holds(converted) for bound in _bounds(kind, marks)):
                return converted
            refused = _OutOfRange(converted)
        except _OutOfRange:
            refused = _OutOfRange(value)
        except _WrongType:
            continue
    raise refused


def _converted(value: Any, kind: Any) -> Any:
    """`value` as a `kind`, which is neither a union nor marked, has it; _WrongType where it is no such value,
    _OutOfRange for a choice that is none, or something in a list."""
    origin = get_origin(kind)
    if isinstance(value, Spelled):
        value = _as_meant(value, kind)
    if origin is Literal:
        choices = get_args(kind)
        if type(value) not in map(type, choices):
            raise _WrongType
        if value not in choices:
            raise _OutOfRange(value)
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_taken(item, members_of(get_args(kind)[0])) for item in value)
    if origin is dict and isinstance(value, dict):
        return {str(key): _taken(item, members_of(get_args(kind)[1])) for key, item in value.items()}
    if kind is float and _is_number(value):
        try:
            return float(value)
        except OverflowError:  # a whole number that no float holds
            return math.inf
    if kind is int and isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise _TooLargeNumber
    if kind is Any or (isinstance(value, origin or kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise _WrongType


def _as_meant(value: Spelled, kind: Any) -> Any:
    """The text where one is expected, else the value."""
    if kind is str and not (value.text == "" and not isinstance(value, Word)):  # in a file that is no text, but nothing
        return value.text
    if get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind)):
        return value.value if isinstance(value.value, str) else value.text  # a word may have quotes of YAML here
    if get_origin(kind) is tuple and isinstance(value, Word) and is_text(get_args(kind)[0]):
        return names(str(value.text))
    return plain(value) if kind is Any else value.value


def _bounds(kind: Any, marks: tuple[Any, ...]) -> list[Any]:
    """The marks that a value must hold; what is bounded on both sides is finite."""
    bounds = [mark for mark in marks if not isinstance(mark, str)]
    below, above = (any(isinstance(bound, ends) for bound in bounds) for ends in ((AtLeast, Above), (AtMost, Below)))
    return [*bounds, Finite()] if kind is float and not (below and above) else bounds


def _is_number(value: Any) -> bool:
    """Text, too: YAML 1.1 reads 5e-5 as a string."""
    if not isinstance(value, str):
        return isinstance(value, int | float) and not isinstance(value, bool)
    try:
        float(value)
    except ValueError:
        return False
    return True


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0]).__name__
    if get_origin(kind) is tuple:
        return f"tuple[{' | '.join(_name(part) for part, _ in members_of(get_args(kind)[0]))}, ...]"
    return "None" if kind is NoneType else getattr(kind, "__name__", str(kind))
