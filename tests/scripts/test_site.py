"""The documentation site: it builds without a warning, asks no other host, and its pages are what they should be."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import browser
import pytest
from mkdocs.utils.yaml import yaml_load

from llm_fed import methods

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "mkdocs.yml"
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe|source)[^>]+(?:src|href)=[\"'](?:https?:)?//[^\"']+")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built strictly: a link that leads nowhere or a page that is missing ends it (not so with --quiet)."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def text_of(page: Path) -> str:
    """Of its content, without code."""
    html = page.read_text()
    content = html[html.index("<article") : html.index("</article")]
    return unescape(re.sub(r"<(pre|code)\b.*?</\1>", "", content, flags=re.DOTALL))


def test_it_has_four_shelves_of_few_entries():
    shelves = {next(iter(shelf)): next(iter(shelf.values())) for shelf in yaml_load(CONFIG.read_text())["nav"]}
    assert list(shelves) == ["Tutorial", "How-to", "Reference", "Explanation"]
    assert sum(map(len, shelves.values())) <= 25


@pytest.mark.slow
def test_it_has_no_page_for_maintainers(site):
    for name in ("decisions", "changelog_older", "long", "results/log/flan"):
        assert (ROOT / f"docs/{name}.md").is_file() and not (site / f"{name}.html").exists()


@pytest.mark.slow
def test_no_page_asks_another_host(site):
    """Nor does a style sheet; links that a reader may follow are no requests."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 150
    for page in pages:
        assert not ELSEWHERE.findall(page.read_text()), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet
    assert 'src="assets/iframe-worker.js"' in (site / "index.html").read_text()
    assert (site / "assets/iframe-worker.js").is_file()


@pytest.mark.slow
def test_from_a_folder_it_searches_asks_nobody_and_fits_a_phone(site):
    from selenium.webdriver.support.wait import WebDriverWait

    with browser.chromium() as shown:
        for name in ("index", "methods/fedmerge", "configuration", "results/fedmerge", "api/index"):
            shown.open(site / f"{name}.html", width=390)
            assert shown.run("return document.documentElement.scrollWidth") <= 390, name
            assert all(url.startswith("file:") for url in shown.requests) and not shown.errors, name
        shown.click("label.md-header__button[for=__search]")  # a phone shows a magnifier until it is touched
        shown.type(".md-search__input", "staleness")
        found = WebDriverWait(shown.driver, 20).until(lambda _: shown.texts(".md-search-result__item h1"))
        assert "fedbuff" in found


@pytest.mark.slow
def test_every_method_has_a_page(site):
    for described in methods.builtin():
        page = site / f"methods/{described['name'].replace('+', '-')}.html"
        html = page.read_text()
        assert f'<h1 id="{described["name"].replace("+", "")}">{described["name"]}' in html, page
        headings = re.findall(r"<h2[^>]*>([^<]+)", html)
        assert headings[:4] == ["When to use it", "Formulas", "Settings", "Properties"]
        assert headings[-1] == "The code"
        for setting in described["settings"]:
            assert f"<code>{setting}</code>" in html, f"{page}: {setting}"
    listed = (site / "methods.html").read_text()
    assert 'href="methods/fed-ft.html"><code>fed+ft</code>' in listed


@pytest.mark.slow
def test_no_page_shows_markdown(site):
    """A list without an empty line before it, or a sign that only another reader of Markdown knows."""
    for page in site.rglob("*.html"):
        if page.name != "404.html":
            for sign in (r"\n- ", r"\*\*", r"\n\|", r"(?<![\w`])`(?!`)", r"\]\("):
                assert not re.search(rf"<p>[^<]*{sign}", text_of(page)), f"{page}: {sign}"


@pytest.mark.slow
def test_the_python_interface_has_its_functions(site):
    html = (site / "api/index.html").read_text()
    for name in ("run", "compare", "open_run", "verdict", "load_client", "load_image_model"):
        assert f'href="#llm_fed.{"export.load" if "load" in name else "commands.api"}.{name}"' in html, name
    assert "llm_fed.method.Method.client_update" in (site / "api/method.html").read_text()


def test_every_formula_of_the_page_is_understood():
    """What the converter does not know it writes as it stands, with its backslash."""
    converter = pytest.importorskip("latex2mathml.converter", reason="it needs latex2mathml (the extra docs)")
    formulas = re.findall(r"\$`(.*?)`\$", (ROOT / "docs/formulas.md").read_text())
    assert len(formulas) > 150
    for formula in formulas:
        assert "\\" not in converter.convert(formula), formula


@pytest.mark.slow
def test_formulas_pictures_and_tables_are_drawn(site):
    """LaTeX is MathML, pictures of the dark follow the switch, and a table of sentences is a list on a phone, whose
    cells name their columns; a table of figures stays one."""
    formulas, gallery = ((site / f"{name}.html").read_text() for name in ("formulas", "gallery"))
    assert formulas.count("<math") > 150 and "$<code" not in formulas
    assert "_dark.png#only-dark" in gallery and ".png#only-light" in gallery and "<picture>" not in gallery
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert any("<table data-list>" in html and "data-head=" in html for html in pages)
    assert any("<table>" in html and "data-figure" in html for html in pages)
