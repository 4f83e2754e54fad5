"""Which column of a table names the client of each row, where no column has a usual name for that: one that is named
after who holds data, else one that is named after a group."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from llm_fed.rows import Cell, Row, Source, columns

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
LONG = 80  # characters of a client's name
ROWS_EACH = 2  # of a client on average, at the least
_GOOD = 0.9  # share of the rows that must name a client; `task.bad_rows: skip` leaves the others out


def find(sources: Iterable[Source], taken: Iterable[str]) -> tuple[str, int] | None:
    """The one column that plainly names the clients, and how many there are; None where there is none, or several.
    `sources`: whose rows are gone through. `taken`: columns that hold something else."""
    rows, others = 0, {*taken}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in (row for source in sources for row in source if isinstance(row, Row)):
        rows += 1
        for name, cell in _cells(row.values):
            if name not in others and _names(name) and (value := _client(cell)):
                counts[name][value] += 1
    for words in (HOLDERS, GROUPS):
        named = []
        for name, own in counts.items():
            fits = 2 <= len(own) <= rows / ROWS_EACH and own.total() >= _GOOD * rows
            if fits and _names(name) is words and not all(value.casefold() in SPEAKERS for value in own):
                named.append(name)
        if named:
            return (named[0], len(counts[named[0]])) if len(named) == 1 else None
    return None


def _cells(values: Mapping[str, Cell]) -> Iterator[tuple[str, Cell]]:
    """The columns of a row, and the fields within them (`ticket.desk`)."""
    for name, cell in values.items():
        if isinstance(cell, dict):
            yield from ((f"{name}.{inner}", value) for inner, value in cell.items())
        else:
            yield name, cell


def _client(cell: Cell) -> str:
    """What a cell says if it may be a client's name or number; else empty."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    text = str(cell).strip() if isinstance(cell, str | int) and not isinstance(cell, bool) else ""
    return text if len(text) <= LONG and "\n" not in text else ""


@cache
def _names(column: str) -> tuple[str, ...] | None:
    """After which of HOLDERS and GROUPS a column is named; None: after neither, or after a property of a row."""
    found = _words(column.rpartition(".")[2])
    if found & set(PROPERTIES) or not columns.unused([column], ()):
        return None
    return next((words for words in (HOLDERS, GROUPS) if found & set(words)), None)


def _words(name: str) -> set[str]:
    """hospital_id, HospitalName, the hospitals -> {hospital}; of scripts without spaces the words that are in it."""
    words = {word.casefold() for word in _WORD.findall(name)} - set(_AROUND)
    inside = {word for word in (*HOLDERS, *GROUPS, *PROPERTIES) if not word.isascii() and word in name.casefold()}
    return words | {word.removesuffix("s") for word in words} | inside
