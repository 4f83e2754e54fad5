"""Pictures of the pages: the gallery shows what its script draws, and the curve over own rows is that of its scores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gallery.md").read_text()
PICTURES = ROOT / "docs/images/gallery"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/figures"))
    import gallery

    return gallery


def test_the_page_has_the_commands_of_the_script(script):
    said = [line for line in re.sub(r" \\\n +", " ", PAGE).splitlines()]
    for command in script.COMMANDS:
        assert command in said


def test_the_page_shows_every_picture_and_no_other(script):
    both = [*script.FIGURES, *script.SCREENS]
    drawn = {*both, *script.FILES, *(f"{name}_dark" for name in script.SCREENS)}
    assert set(re.findall(r"images/gallery/(\w+)\.png", PAGE)) == drawn == {path.stem for path in PICTURES.iterdir()}


# The curve over own rows


def test_the_picture_is_that_of_the_kept_scores(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/figures"))
    import own_rows

    numbers = own_rows.scores(own_rows.kept())
    assert list(numbers) == list(own_rows.ROWS) and numbers["local"][8][0] == pytest.approx(53.2, abs=0.1)
    assert own_rows.picture(numbers) == (ROOT / "docs/images/own_rows.svg").read_text()
