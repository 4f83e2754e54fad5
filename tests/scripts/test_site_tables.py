"""Which tables of the site become lists on a phone, and how its figures are kept whole."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import browser
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    return importlib.import_module("site_tables")


def table(*rows: tuple[str, ...]) -> str:
    """As Python-Markdown writes one."""
    kinds = ["th", *["td"] * (len(rows) - 1)]
    lines = ["".join(f"<{kind}>{cell}</{kind}>" for cell in row) for kind, row in zip(kinds, rows, strict=True)]
    return "<table>\n" + "\n".join(f"<tr>\n{line}\n</tr>" for line in lines) + "\n</table>"


WORDS = table(
    ("files", "client", "split"), ("<code>north-train.csv</code>, <code>north.csv</code>", "the rest of the name", "x")
)
FIGURES = table(
    ("what was tried", "mean", "to <code>local</code>"),
    ("fedlora, at least half of the steps own", "64.4", "-9.0 [-15.2, -2.8]"),
    ("fedlora, a third or a fifth of them own", "58.7", "-14.7 [-18.1, -11.4]"),
)


def test_a_table_of_sentences_becomes_a_list_that_names_its_columns(hook):
    drawn = hook.on_page_content(f"<p>before</p>{WORDS}")
    assert "<p>before</p><table data-list>" in drawn
    assert '<td data-head="client" data-long>the rest of the name</td>' in drawn
    assert re.sub(r" data-[a-z]+(?:=\"[^\"]*\")?", "", drawn) == f"<p>before</p>{WORDS}"


def test_a_table_of_figures_stays_one_and_its_figures_are_whole(hook):
    drawn = hook.on_page_content(FIGURES)
    assert drawn.startswith("<table>") and '<td data-head="to local" data-figure>-9.0 [-15.2, -2.8]</td>' in drawn
    assert drawn.count("data-figure") == 4 and drawn.count("data-long") == 2


def test_a_table_that_fits_a_phone_stays_one(hook):
    assert hook.on_page_content(table(("a", "b"), ("a short cell", "another"))).startswith("<table>")


def test_a_phone_shows_every_cell_of_a_list_in_full_width(hook, tmp_path):
    sheet = (ROOT / "docs/assets/site.css").read_text()
    page = tmp_path / "page.html"
    frame = '<body style="margin: 0"><div class="md-typeset"><div class="md-typeset__table">'
    page.write_text(f"<!doctype html><style>{sheet}</style>{frame}{hook.on_page_content(WORDS)}</div></div>")
    widths = "return [...document.querySelectorAll('td')].map(cell => cell.getBoundingClientRect().width)"
    head = "return getComputedStyle(document.querySelectorAll('td')[1], '::before').content"
    with browser.chromium() as shown:
        shown.open(page, width=390)
        assert min(shown.run(widths)) > 300 and "client" in shown.run(head)
        shown.open(page, width=1280)
        assert max(shown.run(widths)) < 900 and shown.run(head) == "none"
