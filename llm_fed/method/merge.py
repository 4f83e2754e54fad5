"""Merger: what a paper on merging contributes, a function of one client's federated and local model.

    @Merger(paper="Model soups (Wortsman et al. 2022)", data_free=True)
    def soup(client: Client, fed: State, local: State, *, weight: float = 0.5) -> Merged:
        return weight * fed + (1 - weight) * local, {"lambda_fed": weight}

Its keyword arguments are its settings, with types, ranges and defaults as a method's fields have them. It returns the
merged state and its recipe: what it found, as JSON values, for metrics.jsonl and the model card; a `note` there is also
printed. It is a coroutine function where it asks the client for something, as in `await client.gradient_moments(...)`.

Under a name, a merger is a `Merge`: a run that merges the models of two others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass
from typing import Any, ClassVar

from llm_fed.method import Json, Method, Parent, Upload
from llm_fed.method.client import Client
from llm_fed.method.heads import refuse_without_head
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.settings import PositiveInt
from llm_fed.state import State
from llm_fed.state.wire import Message

Merged = tuple[State, dict[str, Json]]  # and the recipe
Function = Callable[..., Any]  # (client, fed, local, *, settings) -> Merged, or a coroutine of it


@dataclass(frozen=True, kw_only=True)
class Merger:
    """Declares, as a decorator, that a function merges; the function stays as it is."""

    paper: str = ""  # for model cards and `llm-fed methods`
    data_free: bool = False  # it looks at no example
    # Whether the merged adapter has twice the rank of its parents; a function says it of the settings, as in the next.
    doubles: bool | Callable[[Merge], bool] = False
    # What it does that is for held-out examples, if the client has none, in words (`Method.without_held_out`).
    without_held_out: str | Callable[[Merge], str] = ""
    of_head: Sequence[str] = ()  # settings that count only where a head is trained beside the adapters
    refuse: Callable[[Merge], None] | None = None  # raises UserError where settings do not go together

    def __call__(self, function: Function) -> Function:
        own = [each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
        for each in own:
            if each.name in (*dir(Merge), *Merge.__annotations__):
                raise TypeError(f"{function.__name__}: {each.name} is taken by every merge; rename the setting")
        kind = make_dataclass(
            function.__name__,
            [(each.name, _given(each.annotation, Any), field(default=_given(each.default, MISSING))) for each in own],
            bases=(Merge,),
            frozen=True,
            kw_only=True,
            namespace={"function": staticmethod(function), "merger": self, "paper": self.paper},
        )
        # Under this name other processes find it again, and there the types of its settings are looked up.
        kind.__module__, kind.__qualname__, kind.__doc__ = function.__module__, function.__qualname__, function.__doc__
        _KINDS[function] = kind
        return function


@dataclass(frozen=True)
class Merge(Method):
    """A run that trains FedIT and local adapters, or finds them, and merges each client's two by a function. It has no
    rounds. In `finish`, the message to a client is its model in each parent, by the parent's name."""

    adapters_only: ClassVar[bool] = True
    unaudited: ClassVar[str] = "the merging itself; audit each of the runs in needs/ that it started from"
    function: ClassVar[Function]
    merger: ClassVar[Merger]  # what is declared of the function

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merger.refuse:
            self.merger.refuse(self)

    @property
    def parents(self) -> tuple[Parent, ...]:  # type: ignore[override]
        """FedIT's run and that of local training, in the order of the function's arguments."""
        heads = {"private_head": True} if self.private_head else {}
        return Parent("fedit", self.fed_round, heads), Parent("local", self.local_round)

    @property
    def without_held_out(self) -> str:  # type: ignore[override]
        said = self.merger.without_held_out
        return said if isinstance(said, str) else said(self)

    def requested(self, clients: Sequence[str]) -> Sequence[str]:
        return ()

    def describe(self, rounds: int) -> str:
        return f"trains {' and '.join(parent.name for parent in self.parents)} first and merges their results"

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        doubles = self.merger.doubles
        return structure.doubled() if (doubles(self) if callable(doubles) else doubles) else structure

    def init(self, server: Server) -> None:
        if self.merger.of_head:
            refuse_without_head(self, server, *self.merger.of_head)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        return state  # there are no rounds, so `server.aggregation` has nothing to average

    async def finish(self, client: Client, message: Mapping[str, State]) -> None:
        fed, local = (message[parent.name] for parent in self.parents)
        of_all = {each.name for each in fields(Merge)}
        own = {name: value for name, value in asdict(self).items() if name not in of_all}
        merged = self.function(client, fed, local, **own)
        client.memory["merged"], client.memory["recipe"] = await merged if inspect.isawaitable(merged) else merged

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]


_KINDS: dict[Function, type[Merge]] = {}  # by the function that merges


def kind_of(attribute: Any) -> Any:
    """The class of method that a module's attribute stands for: of a merger its `Merge`, else the thing itself."""
    return _KINDS.get(inspect.unwrap(attribute), attribute) if inspect.isfunction(attribute) else attribute


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is inspect.Parameter.empty else value
