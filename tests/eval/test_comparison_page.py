"""The page of a comparison: what stands in it, and that a browser sorts it."""

import re
from functools import partial
from pathlib import Path

import pytest
from browser import chromium
from report_page import Page

from llm_fed.bench.costs import Parameters, Traffic
from llm_fed.eval.plots import plot_methods, plot_tradeoff
from llm_fed.eval.report.comparison import write_comparison
from llm_fed.eval.report.page import prose
from llm_fed.eval.style import bounded
from llm_fed.eval.tables import ComparisonRow, RunResult, Table

SCORES = {"local": {"a": 10.0, "b": 30.0}, "<b>fed</b>merge": {"a": 40.0, "b": 20.0}}


@pytest.fixture(scope="module")
def quick_reports():
    """Its picture is drawn."""


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    rows = []
    for label, scores in SCORES.items():
        row = ComparisonRow(label, [], "local", Parameters())
        row.results[0] = RunResult("", 1, scores, sum(scores.values()) / 2, min(scores.values()), Traffic())
        rows.append(row)
    table = Table("rouge1", [0], 100, rows, ["A note."])
    draw = partial(plot_methods, scores=table.by_client, metric="rouge1")
    return write_comparison(table, folder / "table.html", {"score_by_client": draw})


def test_it_holds_rows_clients_notes_and_pictures(written):
    page = Page(written.read_text())
    for expected in (
        "rouge1 (0–100) on each client's test examples · seed 0",
        "method mean worst half a client sends and receives",
        "base – –",
        "local 20.00 10.00 0 bytes 0 bytes <b>fed</b>merge 30.00 20.00 0 bytes 0 bytes",
        "Scores of the 2 clients",
        "A note.",
        "client local <b>fed</b>merge a 10.0 40.0 b 30.0 20.0",
        "Score by client",
    ):
        assert expected in page.text
    assert all(address.startswith("data:") for address in page.addresses) and page.tags.count("img") == 1
    assert page.text.index("Methods") < page.text.index("Verdict") < page.text.index("Plots") < page.text.index("Notes")
    assert "`" not in page.text


def test_a_browser_sorts_it(written):
    with chromium() as browser:
        browser.open(written, width=390)
        assert browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        assert browser.texts("#clients tbody th") == []  # on demand
        browser.click("details > summary")
        browser.click("#clients thead button", 2)
        assert browser.texts("#clients tbody th") == ["b", "a"]
        assert browser.errors == [] and browser.requests == [written.as_uri()]


def test_code_in_sentences_is_no_backtick():
    assert prose("a `<b>` is > `c`") == "a <code>&lt;b&gt;</code> is &gt; <code>c</code>"
    assert prose("a lone ` stays") == "a lone ` stays"


def test_no_score_is_beyond_100(tmp_path):
    """Neither error bars nor ticks; and half an adapter is 0.5×, where an SI prefix would make 500 m× of it."""
    texts = re.findall(r"<!-- (.*?) -->", plot_tradeoff(
        tmp_path / "p.svg", {"one": [("one", 0.5, 99.0, 30.0)], "two": [("two", 0.25, 2.0, None)]},
        cost="parameters", unit="×", metric="rouge1",
    ).read_text())  # fmt: skip
    assert "0.5×" in texts and not any("m×" in text for text in texts)
    assert max(float(text) for text in texts if re.fullmatch(r"[\d.]+", text)) == 100
    assert bounded(99, 30) == (30, 1) and bounded(2, 3) == (2, 3)
    scores = {"one": {"a": [99.0, 100.0], "b": [60.0, 100.0]}}
    texts = re.findall(r"<!-- (.*?) -->", plot_methods(tmp_path / "m.svg", scores, metric="rouge1").read_text())
    assert max(float(text) for text in texts if re.fullmatch(r"[\d.]+", text)) == 100
