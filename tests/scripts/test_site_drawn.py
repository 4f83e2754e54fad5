"""How the site draws formulas and pictures: LaTeX becomes MathML, and pictures of the dark follow the site's switch."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FORMULAS = re.findall(r"\$`(.*?)`\$", (ROOT / "docs/formulas.md").read_text())
WRITTEN = r"<td>client: $<code>\lVert \theta \rVert &lt; 2</code>$</td>"


@pytest.fixture
def hook(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    return importlib.import_module("site_drawn")


def test_a_formula_becomes_mathml(hook):
    pytest.importorskip("latex2mathml", reason="formulas of the site need latex2mathml (the extra docs)")
    drawn = hook.on_page_content(WRITTEN)
    assert drawn.startswith("<td>client: <span") and "<math" in drawn and "&#x003B8;" in drawn and "$" not in drawn
    assert r'title="\lVert \theta \rVert &lt; 2"' in drawn
    assert hook.on_page_content("<p>costs 2 $ <code>x</code></p>") == "<p>costs 2 $ <code>x</code></p>"


def test_every_formula_of_the_page_is_understood(hook):
    """What the converter does not know it writes as it stands, with its backslash."""
    converter = pytest.importorskip("latex2mathml.converter", reason="it needs latex2mathml (the extra docs)")
    assert len(FORMULAS) > 150
    for formula in FORMULAS:
        assert "\\" not in converter.convert(formula), formula


def test_without_the_converter_formulas_stay_code(hook, monkeypatch, caplog):
    monkeypatch.setattr(hook, "find_spec", lambda name: None)
    caplog.set_level("INFO")
    assert hook.on_page_content(WRITTEN) == WRITTEN and hook.on_config(None) is None
    assert "formulas stay code" in caplog.text


def test_a_picture_of_the_dark_follows_the_switch(hook):
    page = (ROOT / "docs/gallery.md").read_text()
    written = re.search(r"<picture>.*?</picture>", page, re.DOTALL)
    assert written, "the gallery has none"
    drawn = re.fullmatch(
        r'<img src="(\S+)" alt="[^"]+"><img src="(\S+)" alt="[^"]+">', hook.on_page_content(written[0])
    )
    assert drawn, "there is no picture for each"
    light, dark = drawn.groups()
    assert light.endswith(".png#only-light") and dark.endswith("_dark.png#only-dark")
    assert "<picture>" not in hook.on_page_content(page)
