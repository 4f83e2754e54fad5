"""Ranges that fields carry: what each refuses, at its bounds and beyond, whichever way the value comes in."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import every
import pytest

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.method import Method
from llm_fed.methods.fedit import FedIT
from llm_fed.settings import (
    Above,
    AtLeast,
    AtMost,
    Below,
    NonEmpty,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_fields,
    coerce,
    hints,
    members_of,
    range_of,
    section_of,
)
from llm_fed.settings.config import AdapterConfig, Config
from llm_fed.settings.configfile import from_dict

HUGE = 10**400  # no float holds it


@dataclass(frozen=True)
class Field:
    """One field of a configuration's section or of a method, and how a value gets there."""

    key: str
    hint: Any
    default: Any
    doors: tuple[Callable[[Any], Any], ...]  # each takes a value, and refuses a bad one

    def __str__(self) -> str:
        return self.key


def of_methods() -> Iterator[Field]:
    for name, kind in methods.BUILTIN.items():
        for field in dataclasses.fields(kind):

            def by_name(value: Any, name: str = name, key: str = field.name) -> Method:
                return methods.build({"name": name, key: value})

            def in_python(value: Any, kind: type[Method] = kind, key: str = field.name) -> Method:
                return kind(**{key: value})

            yield Field(f"method.{field.name}", hints(kind)[field.name], field.default, (by_name, in_python))


def of_sections(kind: type = Config, path: tuple[str, ...] = ()) -> Iterator[Field]:
    default = kind()
    for name, hint in hints(kind).items():
        keys = (*path, name.removesuffix("_"))
        if section := section_of(hint):
            yield from of_sections(section, keys)
        elif get_origin(hint) is not dict:

            def in_a_file(value: Any, keys: tuple[str, ...] = keys) -> Config:
                tree = value
                for key in reversed(keys):
                    tree = {key: tree}
                return from_dict(tree)

            yield Field(".".join(keys), hint, getattr(default, name), (in_a_file,))


FIELDS = [*of_methods(), *of_sections()]


def number(field: Field) -> tuple[type, list[Any]] | None:
    """Whether it is an int or a float, and its bounds."""
    for kind, marks in members_of(field.hint):
        if kind in (int, float):
            return kind, [mark for mark in marks if not isinstance(mark, str)]
    return None


def limit(bound: Any) -> float:
    (value,) = dataclasses.astuple(bound)
    return value


def beyond(kind: type, bounds: list[Any]) -> Iterator[float]:
    """The nearest number beyond each bound, and those that are no number of this kind."""
    for bound in bounds:
        low, value = isinstance(bound, AtLeast | Above), limit(bound)
        if isinstance(bound, Above | Below):
            yield value
        else:
            yield math.nextafter(value, -math.inf if low else math.inf) if kind is float else value + 1 - 2 * low
    if kind is float:
        yield from (math.nan, math.inf, -math.inf)


NUMBERS = [field for field in FIELDS if number(field)]


def refuses_what_is_beyond_its_range(field: Field) -> None:
    kind, bounds = number(field)
    for value, door in itertools.product(beyond(kind, bounds), field.doors):
        with pytest.raises(UserError) as refused:
            door(value)
        said = str(refused.value)
        assert said.startswith(f"{field.key} is ") and "; it must be " in said, said
        assert all(f"{limit(bound)}" in said for bound in bounds), said
    for bound in bounds:
        if isinstance(bound, AtLeast | AtMost):
            assert coerce(kind(limit(bound)), field.hint, field.key) == limit(bound)
    for door in field.doors if kind is int else ():
        with pytest.raises(UserError, match=f"^{field.key} is a whole number of more than 64 bits; give a small"):
            door(HUGE)


def takes_numbers_alone(field: Field) -> None:
    kinds = [kind for kind, _ in members_of(field.hint)]
    lists = [] if any(get_origin(kind) is tuple for kind in kinds) else [[1]]
    for value in (True, "many", *lists, *([] if NoneType in kinds else [None])):
        for door in field.doors:
            with pytest.raises(UserError, match=f"^{field.key} is .*; it (takes|must be) "):
                door(value)


def test_a_number_is_refused_exactly_outside_its_range():
    every.passes(NUMBERS, refuses_what_is_beyond_its_range)


def test_null_a_truth_and_words_are_no_numbers():
    every.passes(NUMBERS, takes_numbers_alone)


def test_every_number_has_a_range():
    """Whoever adds one says what it may be."""
    assert [field.key for field in NUMBERS if not number(field)[1]] == ["method.weight_seed"]


def test_defaults_are_within_their_ranges():
    every.passes(FIELDS, lambda field: coerce(field.default, field.hint, field.key))


CHOICES = [field for field in FIELDS if any(get_origin(kind) is Literal for kind, _ in members_of(field.hint))]


def takes_what_it_names(field: Field) -> None:
    choices = [choice for kind, _ in members_of(field.hint) if get_origin(kind) is Literal for choice in get_args(kind)]
    assert [coerce(choice, field.hint, field.key) for choice in choices] == choices
    for door in field.doors:
        with pytest.raises(UserError) as refused:
            door("no such choice")
        assert all(choice in str(refused.value) for choice in choices) and str(refused.value).startswith(field.key)


def test_a_choice_is_one_of_those_that_it_names():
    every.passes(CHOICES, takes_what_it_names)


@dataclass(frozen=True)
class FromOutside(Method):
    """As somebody else would write it: nothing is called."""

    paper = "none"
    strength: PositiveFloat = 1.0
    kind: Literal["soft", "hard"] = "soft"
    table: dict[str, float] = dataclasses.field(default_factory=dict)  # of a type that no file can give


def test_a_method_from_outside_is_checked_without_calling_anything(monkeypatch):
    monkeypatch.setitem(methods.BUILTIN, "outside", FromOutside)
    assert FromOutside(2).strength == 2 and methods.build({"name": "outside", "strength": 2}) == FromOutside(2.0)
    for make in (lambda **given: FromOutside(**given), lambda **given: methods.build({"name": "outside", **given})):
        with pytest.raises(UserError, match="^method.strength is 0.0; it must be above 0 and finite$"):
            make(strength=0)
        with pytest.raises(UserError, match="^method.kind='sof' is unknown .the closest is 'soft'.; known: soft, hard"):
            make(kind="sof")
        with pytest.raises(UserError, match="^method.table is 3 .int.; it takes dict$"):
            make(table=3)


@dataclass(frozen=True)
class Unreadable(Method):
    strength: PositiveFlaot = 1.0  # type: ignore[name-defined]  # noqa: F821


def test_a_type_that_its_module_does_not_have():
    with pytest.raises(UserError, match="Unreadable: the type of a field cannot be read, as name 'PositiveFlaot'"):
        Unreadable()


@pytest.mark.parametrize(
    "hint, value, message",
    [
        (PositiveInt | None, 0, "key is 0; it must be at least 1, or null"),
        (Annotated[PositiveInt | None, "for all"], 0, "key is 0; it must be at least 1, or null for all"),
        (Annotated[PositiveFloat, "in seconds"], "nan", "key is nan; it must be above 0 and finite, in seconds"),
        (NonNegativeFloat, HUGE, "key is inf; it must be at least 0 and finite"),
        (float, -math.inf, "key is -inf; it must be finite"),
        (Annotated[float, AtLeast(0), Below(1)], 1, "key is 1.0; it must be at least 0 and below 1"),
        (Literal["auto"] | PositiveInt, 0, "key is 0; it must be auto or at least 1"),
        (Literal["auto"] | PositiveInt, "all", "key is 'all'; it must be auto or at least 1"),
        (Literal["auto"] | PositiveInt, 0.5, "key is 0.5 (float); it takes auto or int"),
        (Literal["crop"] | None, "corp", "key='corp' is unknown (the closest is 'crop'); known: crop"),
        (tuple[PositiveInt, ...], [2, 0], "key is [2, 0]; it must be each at least 1"),
        (Annotated[tuple[str, ...], NonEmpty("names")] | PositiveInt, [], "key is []; it must be names or at least 1"),
        (tuple[str, ...] | None, [1], "key is [1] (list); it takes None or tuple[str, ...]"),
    ],
)
def test_what_is_said_of_a_refused_value(hint, value, message):
    with pytest.raises(UserError) as refused:
        coerce(value, hint, "key")
    assert str(refused.value) == message


def test_what_is_taken():
    assert coerce((1, 2), tuple[int, ...] | None, "key") == (1, 2) == coerce([1, 2], tuple[int, ...], "key")
    assert coerce(None, tuple[int, ...] | None, "key") is None
    assert coerce("1.5", PositiveFloat | None, "key") == 1.5  # YAML 1.1 reads 5e-5 as a string
    assert coerce("auto", Literal["auto"] | PositiveInt, "key") == "auto"
    assert coerce(3, Literal["auto"] | PositiveInt, "key") == 3
    assert range_of(str) == range_of(bool) == range_of(int) == "" and range_of(float) == "finite"


def test_fields_of_sections_are_checked_with_their_whole_keys():
    config = dataclasses.replace(Config(), adapter=AdapterConfig(rank=0))
    with pytest.raises(UserError, match="^adapter.rank is 0; it must be at least 1 and at most 65536$"):
        check_fields(config, "")


def test_the_list_of_methods_says_the_ranges(llm_fed):
    (fedit,) = (entry for entry in methods.builtin() if entry["name"] == "fedit")
    assert fedit["ranges"] == {"wait": "none, deadline or first_n"}
    assert list(fedit["settings"]) == [field.name for field in dataclasses.fields(FedIT)]
    assert "atlas_size=None (at least 1, or null)" in llm_fed("methods").out
