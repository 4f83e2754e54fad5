"""The page of a comparison: what stands in it, and that a browser sorts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import chromium
from report_page import Page

from llm_fed.eval.costs import Parameters, Traffic
from llm_fed.eval.plots import plot_methods
from llm_fed.eval.report.comparison import write_comparison
from llm_fed.eval.tables import Result, Row, Table

SCORES = {"local": {"a": 10.0, "b": 30.0}, "<b>fed</b>merge": {"a": 40.0, "b": 20.0}}


@pytest.fixture(scope="module")
def quick_reports():
    """Its picture is drawn."""


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    rows = []
    for label, scores in SCORES.items():
        row = Row(label, [], "local", Parameters())
        row.results[0] = Result("", 1, scores, sum(scores.values()) / 2, min(scores.values()), Traffic())
        rows.append(row)
    table = Table("rouge1", [0], 100, rows, ["A note."])
    table.pictures = [plot_methods(folder / "score_by_client.png", table.by_client, metric="rouge1")]
    return write_comparison(table, folder / "table.html")


def test_it_holds_rows_clients_notes_and_pictures(written):
    page = Page(written.read_text())
    for expected in (
        "rouge1 (0–100) on each client's test examples · seed 0",
        "local 10.00 30.00 20.00 10.00 1",
        "<b>fed</b>merge 40.00 20.00 30.00 20.00 1",
        "A note.",
        "client local <b>fed</b>merge a 10.0 40.0 b 30.0 20.0",
        "Score by client",
    ):
        assert expected in page.text
    assert all(address.startswith("data:") for address in page.addresses) and page.tags.count("img") == 1


def test_a_browser_sorts_it(written):
    with chromium() as browser:
        browser.open(written, width=390)
        assert browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        browser.click("#clients thead button", 2)
        assert browser.texts("#clients tbody th") == ["b", "a"]
        assert browser.errors == [] and browser.requests == [written.as_uri()]
