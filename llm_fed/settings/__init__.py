"""Settings: each field of a configuration or a method declares its type and range, and pydantic checks both.

    num_models: PositiveInt = 8
    mixing: Annotated[float, Above(0), AtMost(1)] = 0.4
    wait: Literal["none", "deadline", "first_n"] = "none"

Every float must be finite. A string in `Annotated` is appended to the error message of a refused value: a unit, or what
null means. A check that relates two fields is code in their class.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

# Under our names, and no subclasses of them: pydantic passes over a mark that it does not know.
from annotated_types import Ge as AtLeast
from annotated_types import GroupedMetadata, MinLen
from annotated_types import Gt as Above
from annotated_types import Le as AtMost
from annotated_types import Lt as Below

from llm_fed.basics.documents import Word, names, plain, text_of
from llm_fed.basics.errors import UserError, require

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclasses.dataclass(frozen=True)
class NonEmpty(GroupedMetadata):
    """A list or text that holds something: `what`."""

    what: str

    def __iter__(self) -> Iterator[MinLen]:
        yield MinLen(1)


_BOUNDS = {AtLeast: "at least", Above: "above", AtMost: "at most", Below: "below"}
_OUT_OF_RANGE = (
    "greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number", "too_short", "literal_error",
)  # fmt: skip
_WITH_COMMA = re.compile(r"[-+]?\d*,\d+(?:e[-+]?\d+)?", re.IGNORECASE)  # a number as it is written in German
_LARGEST = 2**63  # whole numbers have 64 bits everywhere else, too

PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]


class Setting(NamedTuple):
    """A field of a dataclass."""

    name: str
    hint: Any  # its type, with its marks
    section: type | None  # the dataclass that it holds, if it is a section


def _schema(kind: type) -> Mapping[str, Setting]:
    """The fields of a dataclass by their keys in a file; UserError where its module lacks a type."""
    try:
        types = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise UserError(
            f"{kind.__module__}.{kind.__qualname__}: the type of a field cannot be read, as {error}; import what it "
            "names, and not only under `if TYPE_CHECKING`"
        ) from error
    found = ((field.name, types[field.name]) for field in dataclasses.fields(kind))
    # `with` is a word of Python, so its field is `with_`
    return {name.removesuffix("_"): Setting(name, hint, section_of(hint)) for name, hint in found}


schema: Callable[[type], Mapping[str, Setting]] = cache(_schema)


def hints(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name, with their marks; UserError as of `schema`."""
    return {name: hint for name, hint, _ in schema(kind).values()}


def hint_of(kind: type, key: Sequence[str]) -> Any:
    """The type of a field of a dataclass, or of one of its sections; None where it has no such field."""
    found = schema(kind).get(key[0])
    if found is None or len(key) == 1:
        return found and found.hint
    return hint_of(found.section, key[1:]) if found.section else None


def section_of(hint: Any) -> type | None:
    """The dataclass that a field holds, if it is a section."""
    kinds = (kind for kind, _ in members_of(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def check_fields(settings: Any, where: str) -> None:
    """UserError for the first value of a dataclass that does not have the declared type and range, and what it must be.
    `where` is the prefix of field names in messages, such as `method.` in `method.mixing`."""
    for key, (name, hint, _) in schema(type(settings)).items():
        value = getattr(settings, name)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{where}{key}.")
        else:
            coerce(value, hint, f"{where}{key}")


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
    """`value` as the field's type has it: a whole number as a float, a list as a tuple, of what is spelled the text
    where the type is one. UserError where it is of another type, or out of range."""
    from pydantic import ValidationError  # which no help needs

    beyond: list[Any] = []  # what is of the right type, but out of range
    for reading in _readings(value):
        try:
            taken = _adapter(hint).validate_python(reading)
        except ValidationError as refused:
            found = refused.errors(include_url=False, include_context=False)
            # Of choices, which are all texts, pydantic says the same whatever they are compared with.
            known = [each for each in found if each["type"] != "literal_error" or isinstance(each["input"], str)]
            beyond += [reading for each in known if each["type"] in _OUT_OF_RANGE]
        else:
            if not any(map(_is_too_large, taken.values() if isinstance(taken, dict) else [taken])):
                return taken
    raise _refusal(value, hint, key, beyond)


def _refusal(value: Any, hint: Any, key: str, beyond: Sequence[Any]) -> UserError:
    """What is wrong with a value; `beyond`: what it may mean that is of the right type, but out of range."""
    given, kinds = plain(value), [kind for kind, _ in members_of(hint)]
    if int in kinds and _is_too_large(given):
        return UserError(f"{key} is a whole number of more than 64 bits; give a smaller one")
    if not beyond:
        takes, how = " or ".join(sorted({_name(kind) for kind in kinds})), ""
        if isinstance(value, Word) and any(get_origin(kind) is tuple for kind in kinds):
            given, how = value.text, ", as in [a,b], where an item with a comma stands in quotes"
        if float in kinds and isinstance(given, str) and _WITH_COMMA.fullmatch(given):
            how = f"; type {key}={given.replace(',', '.')}"
        if isinstance(given, dict) and is_text(hint):  # YAML takes {prompt} for a mapping
            how = ", in quotes"
        return UserError(f"{key} is {given!r} ({type(given).__name__}); it takes {takes}{how}")
    kinds = [kind for kind in kinds if kind is not NoneType]
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        require(key, beyond[0], get_args(kinds[0]))
    shown = float(beyond[0]) if kinds == [float] else given
    return UserError(f"{key} is {shown!r}; it must be {range_of(hint)}")


def _is_too_large(value: Any) -> bool:
    return isinstance(value, int) and not -_LARGEST <= value < _LARGEST


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    strict = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)  # `true` is no number
    return TypeAdapter(hint, config=strict)


def _readings(value: Any) -> Iterator[Any]:
    """What a value may mean, the likeliest first; that which its type takes is meant."""
    if isinstance(value, Word):
        if value.value is None:
            yield None
        if (items := names(value.text)) is not None:
            yield tuple(items)
        yield value.text
    given = plain(value)
    yield tuple(given) if isinstance(given, list) else given
    if isinstance(given, int | str) and not isinstance(given, bool):
        yield from _numbers(given)
    if isinstance(value, list):
        yield tuple(map(text_of, value))
    if text := text_of(value):
        yield text


def _numbers(value: int | str) -> Iterator[float]:
    """It as a float, of a text, too: YAML 1.1 takes 5e-5 for one."""
    try:
        yield float(value)
    except OverflowError:  # a whole number that no float holds
        yield math.inf if isinstance(value, int) and value > 0 else -math.inf
    except ValueError:
        return


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
    bounds = [f"{_BOUNDS[type(mark)]} {dataclasses.astuple(mark)[0]}" for mark in marks if type(mark) in _BOUNDS]
    bounds += [mark.what for mark in marks if isinstance(mark, NonEmpty)]
    both = [any(isinstance(mark, ends) for mark in marks) for ends in ((AtLeast, Above), (AtMost, Below))]
    if kind is float and not all(both):
        bounds.append("finite")
    each = range_of(get_args(kind)[0]) if get_origin(kind) is tuple else ""
    text = ", ".join(filter(None, [" and ".join(bounds), each and f"each {each}"]))
    return [text] if text else []


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"tuple[{' | '.join(_name(part) for part, _ in members_of(get_args(kind)[0]))}, ...]"
    return "None" if kind is NoneType else getattr(kind, "__name__", str(kind))
