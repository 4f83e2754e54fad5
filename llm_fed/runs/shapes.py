"""What the files of a run folder hold: which values stand where, and in which ranges.

A folder may be damaged, or somebody else's. So whoever reads a file of one checks it here first, and everything behind
that may rely on it. Keys that are not listed are new, or a method's own, and are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    ConfigDict,
    RootModel,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic import create_model as model_of

_LONGEST = 200  # bytes of a client's name, as `llm_fed.tasks` takes it


def _printable(name: str) -> str:
    if not name.isprintable() or not 0 < len(name.encode(errors="replace")) <= _LONGEST:
        raise ValueError("it should be a name")
    return name


Count = Annotated[int, Ge(0), Lt(2**63)]  # a whole number of 64 bits
Positive = Annotated[int, Gt(0), Lt(2**63)]
Model = Annotated[int, Ge(0), Lt(10**5)]  # of a server, by its number
Finite = Annotated[float, AllowInfNan(False)]  # other numbers may be NaN
Score = Annotated[float, AllowInfNan(False), Ge(-1e9), Le(1e9)]  # a metric from elsewhere need not end at 100
Name = Annotated[str, AfterValidator(_printable)]
Names = list[Name]
Scores = Annotated[dict[Name, Score], MinLen(1)]
Sums = dict[str, str]  # checksums by file, or by client
Mark = Annotated[tuple[Count, str], Strict(False)]  # of metrics.jsonl a length, and its digest; JSON has no tuples
# A number, or some by factor, column or both.
Figures = float | dict[str, float | dict[str, float | None] | None] | None


class ShapeError(ValueError):
    """A file does not hold what llm_fed writes."""


class Shape(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(strict=True)


class Beside(Shape):
    """Another metric of the same answers."""

    mean: Finite
    clients: dict[Name, Finite]


class ScoresShape(Shape):
    """Scores; where nobody could be scored there is nothing but `unscored`."""

    metric: str = ""
    clients: Scores = {}
    mean: Score = 0
    worst_half: Score = 0
    std: Score = 0  # earlier versions had none
    loss: float | None = None
    losses: dict[Name, float | None] = {}
    unscored: Names = []
    undefined: Names = []
    beside: dict[Name, Beside] = {}
    needed: ClassVar[frozenset[str]] = frozenset({"metric", "clients", "mean", "worst_half", "losses"})

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        given = self.model_fields_set
        if given & self.needed and (lacking := self.needed - given):
            raise ValueError(f"it has no {min(lacking)!r}")
        return self


class ScoreLine(ScoresShape):
    """The scores of a round."""

    round: Count
    split: str


class RuleLine(ScoreLine):
    """What a rule that looks nothing up would score."""

    metric: str
    clients: Scores
    rules: dict[Name, str] = {}
    needed: ClassVar[frozenset[str]] = ScoresShape.needed - {"losses"}


class WeightsShape(Shape):
    """A row of weights for each client."""

    clients: Names
    values: list[Annotated[list[Finite], MinLen(1)]]

    @model_validator(mode="after")
    def _is_table(self) -> Self:
        if len(self.values) != len(self.clients):
            raise ValueError("it has no row of weights for each client")
        return self


class WarningLine(Shape):
    """What a run warns of."""

    kind: str
    clients: Names
    text: str
    figures: dict[Name, dict[str, Any]]


class CrossShape(Shape):
    """Scores with a row per client's model, and a column per client."""

    metric: str
    split: str
    clients: Names
    scores: list[list[Score | None]]
    base: list[Score | None] = []
    unscored: Names = []
    limit: Count | None = None
    of: Count = 0
    warnings: list[WarningLine] = []
    missing: str = ""

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        rows = [*self.scores, *([self.base] if "base" in self.model_fields_set else [])]
        if len(self.scores) != len(self.clients) or any(len(row) != len(self.clients) for row in rows):
            raise ValueError(f"scores should be a table of {len(self.clients)} rows and columns")
        return self


class EndedShape(Shape):
    """Why a run ended before its last round."""

    round: Positive
    why: str


class Changes(Shape):
    """Data that were others from a round on."""

    round: Count
    words: str


class Inputs(RootModel[dict[str, Sums]]):
    """Checksums by key of the configuration."""

    model_config = ConfigDict(strict=True)


def _object(optional: Mapping[str, Any] | None = None, /, base: type[Shape] = Shape, **needed: Any) -> type[Shape]:
    """An object with these keys, and of `optional` those that are there."""
    fields: dict[str, Any] = {key: (kind, ...) for key, kind in needed.items()}
    fields |= {key: (kind, None) for key, kind in (optional or {}).items()}
    return model_of("Object", __base__=base, **fields)


_COUNTS = ("asked", "arrived", "refused", "failed", "dropped_out", "bytes_up", "bytes_down")
_FIGURES = ("lambda_fed", "fed_share", "a", "b", "c", "distance", "sweep", "grid")
_APART: dict[str, Any] = dict.fromkeys(("only_tested", "left_out", "unscored"), Names)
_LINK: dict[str, Any] = {"round": Count, "metrics": Mark, "chain": str}  # of the chain of digests
_UPDATES: dict[str, Any] = {"loss": float | None, "lr": float | None, "updates": dict[Name, list[Finite | None]]}
_KIND = _object(kind=str)
_METRICS: Mapping[str, type[Shape]] = {
    "round": _object(dict.fromkeys(_COUNTS, Count) | _UPDATES, round=Count, padding=Finite),
    "client": _object({"loss": float | None, "steps": float | None, "staleness": Finite},
                      round=Count, client=Name, examples=Count, bytes_up=Count, bytes_down=Count),
    "score": ScoreLine,
    "after": _object(base=ScoreLine, what=str),
    "rule": _object({"look-up": str}, base=RuleLine),
    "event": _object({"client": str, "reason": str}, round=Count, event=str),
    "drop-out": _object(round=Count, client=Name),
    "search anew": _object(round=Count),
    "server": _object({"weights": WeightsShape, "chosen": dict[Name, Model]}, round=Count),
    "clients": _object(_APART),
    "privacy": _object({"epsilon": float | None, "delta": float | None, "unit": str, "where": str}, round=Count),
    "merge": _object(dict.fromkeys(_FIGURES, Figures), client=Name, rounds=dict[str, Count | None]),
}  # fmt: skip
_DIGESTS: Mapping[str, type[Shape]] = {
    "begin": _object(**_LINK, state=str),
    "round": _object(**_LINK, sent=Sums, uploads=Sums, memory=Sums, state=str, due=bool),
    "end": _object(**_LINK, adapters=Sums),
}
_ENVIRONMENT: dict[str, Any] = {
    **dict.fromkeys(("processes", "threads", "clients_per_pass"), Positive),
    **dict.fromkeys(("captured", "padding_free"), bool),
    **dict.fromkeys(("secret", "fused"), str),
    "continued": list[dict[str, Any]],
    "base": _object(dict.fromkeys(("revision", "quantization", "dtype", "weights"), str), name=str),
}  # fmt: skip
_SUMMARY: dict[str, Any] = {
    "rounds": Count, "ended": EndedShape, "base": ScoreLine, "rule": RuleLine, "notes": list[str], "adapters": str,
    "needs": dict[str, Count | None], "examples": dict[Name, dict[str, Count]], "warnings": list[WarningLine],
    "unchecked": list[str],
}  # fmt: skip
_FILES: Mapping[str, type[BaseModel] | Mapping[str, type[Shape]]] = {
    "metrics.jsonl": _METRICS,
    "digests.jsonl": _DIGESTS,
    "timing.jsonl": _object({"ended": str, "round": Count, "passes": dict[str, Count], "why": str},
                            seconds=Finite, parts=dict[str, Finite]),
    "samples.jsonl": _object({"base": str | None}, client=Name, prompt=str, references=list[str], answer=str),
    "cross.json": CrossShape,
    "warnings.json": _object({"unchecked": list[str]}, warnings=list[WarningLine]),
    "test_scores.jsonl": _object(dict.fromkeys(("own", "base", "rule"), list[Score]), client=Name),
    "summary.json": _object(_SUMMARY | _APART, round=Count, method=str, scores=ScoresShape),
    "environment.json": _object(_ENVIRONMENT),
    "splits.json": _object(written=Count, digests=str, splits=str, clients=list[str], changes=list[Changes]),
    "manifest.json": _object(round=Count, sha256=str, rows=dict[str, str | Sums]),  # a row's file, or an owner's
    "ended.json": EndedShape,
    "continued.json": _object(round=Positive),
    "start.json": _object(sha256=str),
    "delivered.json": _object(files=Sums),
    "inputs.json": Inputs,
}  # fmt: skip


def check(file: str, value: Any) -> None:
    """Refuse a value of a run folder's file: the whole of a JSON file, or a line of a JSONL file. ShapeError: what is
    wrong, and where in the value. `file`: its name."""
    shape = _FILES.get(file)
    try:
        if isinstance(shape, Mapping):
            _KIND.model_validate(value)
            kind = value["kind"]
            if kind not in shape and shape is _DIGESTS:
                raise ShapeError(f"it is of the kind {kind!r:.60}, which no run writes")
            shape = shape.get(kind)
        if shape is not None:
            shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where, said = ".".join(map(str, first["loc"])) or "it", first["msg"].partition(" or instance of ")[0]
        raise ShapeError(f"{where} is {repr(first['input'])[:60]}: {said.removeprefix('Value error, ')}") from error
