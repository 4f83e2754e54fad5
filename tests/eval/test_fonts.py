"""Names in scripts that the usual font of pictures does not have."""

import logging
import re
from pathlib import Path

import every
import pytest
from matplotlib import font_manager

from llm_fed.eval import fonts, plots

NAMES = ["北京协和医院", "上海瑞金医院", "Zürich", "клиника"]
SPELLED = ["BeiJingXieHeYiYuan", "ShangHaiRuiJinYiYuan", "Zürich", "клиника"]
PICTURES = {
    "weights": lambda path: plots.plot_weights(path, NAMES, [[0.5, 0.5]] * 4, groups=[NAMES[0]] * 4, title=NAMES[1]),
    "methods": lambda path: plots.plot_methods(path, {NAMES[0]: {name: [1.0] for name in NAMES}}, metric="rouge1"),
    "mixing": lambda path: plots.plot_mixing(path, {name: {0.0: 1.0, 1.0: 2.0} for name in NAMES}, {}, metric="rouge1"),
    "tradeoff": lambda path: plots.plot_tradeoff(
        path, {NAMES[0]: [(name, float(x), 1.0, None) for x, name in enumerate(NAMES)]}, cost="c", unit="B", metric="m"
    ),
    "bands": lambda path: plots.plot_bands(
        path, {name: ([1, 2], [1.0] * 2, [0.0] * 2, [2.0] * 2) for name in NAMES}, xlabel="round", ylabel="y"
    ),
}


@pytest.fixture(autouse=True)
def with_fonts(monkeypatch):
    """As on a machine that has the fonts that matplotlib brings, and no others."""
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    brought = [entry for entry in font_manager.fontManager.ttflist if "mpl-data" in entry.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", brought)
    fonts._tell.cache_clear()
    fonts.covering.cache_clear()
    yield
    fonts.covering.cache_clear()


def texts(path: Path) -> list[str]:
    """An SVG has each text as a comment before its outlines."""
    return [comment.strip() for comment in re.findall(r"<!--(.*?)-->", path.read_text())]


@pytest.mark.parametrize("name", every.quick(PICTURES, ["mixing", "bands"]))
def test_without_a_font_names_are_spelled_in_latin_letters_and_it_is_said_once(tmp_path, caplog, name):
    with caplog.at_level(logging.WARNING):
        for copy in ("a", "b"):
            PICTURES[name](tmp_path / f"{copy}.svg")
            plots.plot_weights(tmp_path / "other.svg", ["瑞"], [[1.0]], groups=["a"])  # other characters in between
    found = texts(tmp_path / "a.svg")
    for spelled in SPELLED:
        assert spelled in found, found
    assert all(ord(letter) < 0x2E80 for text in found for letter in text)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert len(caplog.records) == 2
    assert "spell them in Latin letters" in caplog.text and "fonts-noto-cjk" in caplog.text


def test_an_installed_font_that_has_the_characters_is_taken(tmp_path, caplog):
    """STIX, which matplotlib brings, has a letter that DejaVu Sans lacks."""
    stix, usual = (
        set(font_manager.get_font(font_manager.findfont(name)).get_charmap()) for name in ("STIXGeneral", "DejaVu Sans")
    )
    letter = next(chr(code) for code in sorted(stix - usual) if chr(code).isalpha())
    path = plots.plot_weights(tmp_path / "a.svg", [f"clinic {letter}"], [[1.0]])
    assert f"clinic {letter}" in texts(path) and caplog.records == []
    assert fonts.covering(frozenset(letter)) == (("STIXGeneral",), frozenset())


def test_boxes_are_no_font(monkeypatch):
    """matplotlib brings a font that has a box for every character there is."""
    chosen, unknown = fonts.covering(frozenset("北"))
    assert (chosen, unknown) == ((), frozenset("北"))
