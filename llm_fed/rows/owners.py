"""Which column of a table names the client of each row, where no column has a usual name for that."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_fed.rows import Row, Source, columns
from llm_fed.rows.cells import value_of
from llm_fed.rows.layout import split_of

# Words for who holds data, the most telling ones first, and words for what may just as well be a property of a row.
HOLDERS = (
    "client", "clients", "site", "hospital", "clinic", "desk", "practice", "office", "branch", "store", "shop", "bank",
    "school", "university", "company", "firm", "organisation", "organization", "org", "institution", "institute",
    "centre", "center", "laboratory", "lab", "facility", "station", "depot", "warehouse", "factory", "agency",
    "customer", "tenant", "user", "username", "owner", "holder", "party", "silo", "node", "device", "machine",
    "patient", "employee", "agent", "operator", "worker", "annotator", "writer", "author", "speaker", "team",
    "dept", "department", "ward", "division", "subreddit", "channel", "account", "member", "kunde", "klinik",
    "standort", "filiale", "abteilung", "praxis", "hôpital", "hopital", "clinique", "agence", "cliente", "clínica",
    "tienda", "oficina", "sede", "客户", "医院", "诊所", "用户", "部门", "机构", "门店", "公司",
)  # fmt: skip
GROUPS = (
    "role", "domain", "group", "community", "region", "country", "city", "town", "village", "district",
    "province", "county", "location", "place", "area", "zone", "land", "stadt", "pays", "ville", "país", "ciudad",
    "地区", "城市", "国家",
)  # fmt: skip
# Words for what a row is, or what was said of it.
PROPERTIES = (
    "label", "labels", "class", "classes", "category", "categories", "tag", "tags", "topic", "type", "kind", "intent",
    "split", "fold", "subset", "language", "lang", "locale", "script", "year", "month", "day", "date", "time", "week",
    "hour", "quarter", "level", "difficulty", "grade", "score", "rating", "stars", "rank", "priority", "severity",
    "sentiment", "emotion", "polarity", "stance", "gender", "sex", "age", "weight", "quality", "status", "version",
    "model", "license", "licence", "style", "format", "task", "length", "count", "turns", "index", "source", "answer",
    "output", "target", "response", "gold", "correct", "flag", "valid", "verified", "toxic", "is", "has", "num",
    "thema", "kategorie", "jahr", "sprache", "langue", "année", "idioma", "类别", "标签", "语言", "年份",
)  # fmt: skip
SPEAKERS = ("user", "assistant", "system", "human", "gpt", "tool", "bot")  # of a conversation, who are no clients
_AROUND = ("id", "ids", "name", "names", "no", "nr", "number", "code", "key", "the", "of", "de", "der")
_WORD = re.compile(r"[A-ZÀ-Þ]+(?![a-zß-ÿ])|[A-ZÀ-Þ]?[a-zß-ÿ]+|\d+|[^\W\d_]+")
_FRACTION = re.compile(r"-?\d+\.\d*[1-9]\d*|-?\d*\.?\d+e-?\d+", re.IGNORECASE)
HOLDER, GROUP, OTHER, PROPERTY = range(4)  # what a column names
LONG = 80  # characters of a client's name
MOST = 10_000  # different values, beyond which no column is looked at any further
ROWS_EACH, ROWS_OF_NAMED = 5, 2  # of a client on average, at the least; where the column's name says that it is one
SHOWN = 6  # columns in a line
_GOOD = 0.9  # share of the rows that must name a client; `task.bad_rows: skip` leaves the others out


@dataclass(frozen=True)
class Candidate:
    """A column with few different values.

    Attributes:
        counts: value -> how many rows have it, as far as rows were looked at.
        rank: what it names; HOLDER are those of data, PROPERTY of a row.
    """

    name: str
    counts: Mapping[str, int]
    rank: int

    def words(self) -> str:
        """For people: desk (5 values, 98 to 120 rows each)."""
        least, most = min(self.counts.values()), max(self.counts.values())
        each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{self.name} ({len(self.counts):,} values, {each} rows each)"


def candidates(sources: Iterable[Source], taken: Iterable[str], answer: str | None) -> list[Candidate]:
    """The columns that may name the client of a row, the most probable ones first.

    Args:
        sources: whose rows are gone through.
        taken: columns that hold something else.
        answer: the column of the answers.
    """
    rows, lost = 0, set(taken)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    answers: dict[tuple[str, str], set[str]] = defaultdict(set)  # of each value up to two different ones
    for row in (row for source in sources for row in source if isinstance(row, Row)):
        rows += 1
        said = str(value_of(row, answer)) if answer else str(rows)  # unknown, so no two are taken for the same
        for name, cell in _cells(row.values):
            if name in lost or cell is None or cell == "":
                continue
            value, own = _name(cell), counts[name]
            if value is None or (len(own) == MOST and value not in own):
                lost.add(name)
                continue
            own[value] += 1
            if len(known := answers[name, value]) < 2:
                known.add(said)

    def decides(name: str) -> bool:  # what the answer is, as a label does
        often = [value for value, count in counts[name].items() if count > 1]
        return bool(often) and all(len(answers[name, value]) == 1 for value in often)

    likely = [
        Candidate(name, own, _rank(name, own, decides(name)))
        for name, own in counts.items()
        if name not in lost and _may_name_clients(name, own, rows)
    ]
    return sorted(likely, key=lambda each: (each.rank, _place(each.name)))


def _cells(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The columns of a row, and the fields within them (`ticket.desk`)."""
    for name, cell in values.items():
        if isinstance(cell, dict):
            yield from ((f"{name}.{inner}", value) for inner, value in cell.items())
        else:
            yield name, cell


def clear(options: Sequence[Candidate]) -> Candidate | None:
    """The one column that plainly names the clients: the only one by which holders of data are named, or where there
    is none of these, the only one by which groups are."""
    for rank in (HOLDER, GROUP):
        if best := [each for each in options if each.rank == rank]:
            return best[0] if len(best) == 1 else None
    return None


def listed(options: Sequence[Candidate]) -> str:
    """Some candidates, in words."""
    more = f" and {len(options) - SHOWN} more columns" if options[SHOWN:] else ""
    return ", ".join(each.words() for each in options[:SHOWN]) + more


def _may_name_clients(name: str, counts: Counter[str], rows: int) -> bool:
    each = ROWS_OF_NAMED if _of_name(name) in (HOLDER, GROUP) else ROWS_EACH
    said = all(split_of(value) or value.casefold() in SPEAKERS for value in counts)
    return 2 <= len(counts) <= rows / each and counts.total() >= _GOOD * rows and not said


def _name(cell: Any) -> str | None:
    """What a cell says if it may be a client's name or number; None: it may not."""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        return None
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() else None
    text = str(cell).strip()
    return text if text and len(text) <= LONG and "\n" not in text and not _FRACTION.fullmatch(text) else None


def _rank(name: str, counts: Counter[str], decides: bool) -> int:
    if (said := _of_name(name)) != OTHER:
        return said
    if decides or all(re.fullmatch(r"-?\d+", value) for value in counts):
        return PROPERTY
    return HOLDER if all(_words(value) & set(HOLDERS) for value in counts) else OTHER


def _of_name(name: str) -> int:
    """What the name of a column says that it names."""
    words = _words(name.rpartition(".")[2])
    if words & set(PROPERTIES) or not columns.unused([name], ()):
        return PROPERTY
    return HOLDER if words & set(HOLDERS) else GROUP if words & set(GROUPS) else OTHER


def _place(name: str) -> int:
    """How telling a name is, among those of its rank."""
    words, order = _words(name), (*HOLDERS, *GROUPS)
    return min((order.index(word) for word in words if word in order), default=len(order))


def _words(name: str) -> set[str]:
    """hospital_id, HospitalName, the hospitals -> {hospital}; of scripts without spaces the words that are in it."""
    words = {word.casefold() for word in _WORD.findall(name)} - set(_AROUND)
    inside = {word for word in (*HOLDERS, *GROUPS, *PROPERTIES) if not word.isascii() and word in name.casefold()}
    return words | {word.removesuffix("s") for word in words} | inside
