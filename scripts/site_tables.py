"""A hook of mkdocs: tables that a phone can show.

A table of sentences becomes a list on a narrow page: each row a block, with the head of its column before each cell.
Tables of figures stay tables, which one compares column by column, and a figure is never broken. What stands here are
attributes, which docs/assets/site.css draws: `data-list` of a table; of a cell `data-head` with its column's head, and
`data-figure` or `data-long`.
"""

from __future__ import annotations

import html
import re
from typing import Any

# About 44 letters and the margins of two cells fill a phone; longer cells are broken, which costs nothing up to here.
_ROOM, _BROKEN_FROM, _A_WORD = 44, 24, 14
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<(?P<kind>t[hd])(?P<more>[^>]*)>(?P<text>.*?)</t[hd]>", re.DOTALL)
_FIGURE = re.compile(r"[-+~<>≤≥]?\s?\d[\d.,:\[\]()%±×x+\s\u00a0-]*")


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with the attributes of its tables."""
    return _TABLE.sub(lambda table: marked(table[0]), content)


def marked(table: str) -> str:
    """A table's HTML with its attributes."""
    rows = [[_plain(cell["text"]) for cell in _CELL.finditer(row[0])] for row in _ROW.finditer(table)]
    if len(rows) < 2 or len({len(row) for row in rows}) != 1:
        return table
    heads = iter(rows[0] * len(rows))

    def cell(match: re.Match[str]) -> str:
        text, head = _plain(match["text"]), next(heads)
        more = f' data-head="{html.escape(head)}"' if match["kind"] == "td" else ""
        more += " data-figure" if _FIGURE.fullmatch(text) else " data-long" if len(text) > _A_WORD else ""
        return f"<{match['kind']}{match['more']}{more}>{match['text']}</{match['kind']}>"

    table = _CELL.sub(cell, table)
    return table.replace("<table>", "<table data-list>", 1) if _is_list(rows) else table


def _is_list(rows: list[list[str]]) -> bool:
    """Whether two columns or more hold words, and the columns together are too wide for a phone."""
    longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    figures = [2 * sum(bool(_FIGURE.fullmatch(text)) for text in column) >= len(rows) - 1
               for column in zip(*rows[1:], strict=True)]  # fmt: skip
    words = [length > _A_WORD and not figure for length, figure in zip(longest, figures, strict=True)]
    return sum(words) >= 2 and sum(min(length, _BROKEN_FROM) for length in longest) > _ROOM


def _plain(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()
