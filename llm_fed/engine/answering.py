"""Which of an engine's methods answers which type of request: the one table of it, filled by decorators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from llm_fed.basics.errors import UserError
from llm_fed.method.requests import Request, Work

Asked = TypeVar("Asked", bound=Request[Any])
Together = TypeVar("Together", bound=Callable[[Any, Sequence[Any]], Sequence[Any]])
Each = TypeVar("Each", bound=Callable[[Any, Any], Any])


def answers(asked: type[Request[Any]]) -> Callable[[Together], Together]:
    """Marks the method that answers requests of this type: all of one structure together."""

    def mark(method: Together) -> Together:
        method.answers = (asked, False)  # type: ignore[attr-defined]
        return method

    return mark


def answers_each(asked: type[Request[Any]]) -> Callable[[Each], Each]:
    """Marks the method that answers requests of this type, one after another."""

    def mark(method: Each) -> Each:
        method.answers = (asked, True)  # type: ignore[attr-defined]
        return method

    return mark


class Answering:
    """An engine: `execute` hands requests to the method that is marked for their type, here or in a class above.

    Attributes:
        of: what it computes with, for messages.
        work: of all training since it was last taken.
        packing: budget and overhead of micro-batches as they were measured; None: by device.
    """

    of: ClassVar[str] = ""
    _answering: ClassVar[dict[type, tuple[str, bool]]] = {}  # by type of request: the method, and whether it takes one

    def __init_subclass__(cls) -> None:
        marked = {name: method.answers for name, method in vars(cls).items() if hasattr(method, "answers")}
        cls._answering = cls._answering | {asked: (name, each) for name, (asked, each) in marked.items()}

    def __init__(self) -> None:
        self.work = Work()
        self.packing: tuple[int, int] | None = None

    def execute(self, requests: Sequence[Request[Any]]) -> Sequence[Any]:
        """One result, or one exception, for each of these requests of one type and structure.

        Raises:
            UserError: nothing here answers requests of this type.
        """
        asked = type(requests[0])
        if asked not in self._answering:
            known = ", ".join(sorted(kind.__name__ for kind in self._answering))
            raise UserError(
                f"the method needs {asked.__name__}, which {self.of} do not support (they support {known}); choose "
                "another base or method"
            )
        name, each = self._answering[asked]
        method = getattr(self, name)
        return [method(request) for request in requests] if each else method(requests)

    def take_work(self) -> Work:
        """The training work since the last call."""
        taken, self.work = self.work, Work()
        return taken
