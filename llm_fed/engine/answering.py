"""Which methods answer which type of request: of the engine, and of the kinds of model and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from llm_fed.method.requests import Request

Method = TypeVar("Method", bound=Callable[..., Any])
Of = Literal["adapters", "whole", "both"]


class Handler(NamedTuple):
    """How a method answers."""

    method: str
    each: bool  # whether it is given one request after another, or all of one structure together


def answers(requested: type[Request[Any]], *, of: Of = "adapters", each: bool = False) -> Callable[[Method], Method]:
    """Marks the method that answers requests of this type from sites that train adapters, whole models, or either.

    Args:
        each: whether it takes one request, and not all of one structure together.
    """

    def mark(method: Method) -> Method:
        method.answers = (requested, of, each)  # type: ignore[attr-defined]
        return method

    return mark


class Answering:
    """A class whose marked methods answer requests.

    Attributes:
        answering: by type of request, and whether adapters are trained, the method that answers it.
    """

    answering: ClassVar[dict[tuple[type, bool], Handler]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.answering = dict(cls.answering)
        for name, method in vars(cls).items():
            if hasattr(method, "answers"):
                requested, of, each = method.answers
                for fused in {"adapters": [True], "whole": [False], "both": [True, False]}[of]:
                    cls.answering[requested, fused] = Handler(name, each)
