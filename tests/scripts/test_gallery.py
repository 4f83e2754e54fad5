"""The gallery: its page shows what its script draws, by the script's commands, and pictures are small."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llm_fed.basics.errors import RunError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gallery.md").read_text()
PICTURES = ROOT / "docs/images/gallery"


def test_the_page_has_the_commands_of_the_script(analysis):
    said = [line for line in re.sub(r" \\\n +", " ", PAGE).splitlines()]
    for command in analysis("gallery").COMMANDS:
        assert command in said


def test_the_page_shows_every_picture_and_no_other(analysis):
    script = analysis("gallery")
    both = [*script.FIGURES, *script.SCREENS]
    drawn = {*both, *script.FILES, *(f"{name}_dark" for name in both)}
    assert set(re.findall(r"images/gallery/(\w+)\.png", PAGE)) == drawn == {path.stem for path in PICTURES.iterdir()}


def test_pictures_are_small(analysis):
    for path in PICTURES.iterdir():
        assert path.stat().st_size <= analysis("gallery").LARGEST, path


def test_a_figure_is_taken_out_of_a_report(analysis, tmp_path):
    script = analysis("gallery")
    page = tmp_path / "report.html"
    light, dark = (base64.b64encode(word).decode() for word in (b"light", b"dark"))
    source = f'<source srcset="data:image/png;base64,{dark}"><img src="data:image/png;base64,{light}">'
    page.write_text(f"<figure><h2>Other</h2>{source[::-1]}</figure>\n<figure><h2>Score</h2>\n{source}</figure>")
    assert script.figure(page, "Score") == {"": b"light", "_dark": b"dark"}
    with pytest.raises(RunError, match="no figure 'Loss'"):
        script.figure(page, "Loss")


def test_a_picture_loses_colours_until_it_is_small(analysis, tmp_path, monkeypatch):
    script = analysis("gallery")
    monkeypatch.setattr(script, "OUT", tmp_path)
    written = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(written, "PNG")
    script.keep("many", written.getvalue())
    monkeypatch.setattr(script, "LARGEST", 1_500)
    script.keep("few", written.getvalue())
    many, few = (Image.open(tmp_path / f"{name}.png") for name in ("many", "few"))
    assert many.size == few.size == (50, 40)
    assert len(few.getcolors()) == 32 < 64 < len(many.getcolors()) <= 256
