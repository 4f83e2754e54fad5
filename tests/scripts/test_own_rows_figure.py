"""The curve over own rows: its points are those of the kept scores, as the script draws them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_picture_is_that_of_the_kept_scores(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/figures"))
    import own_rows

    numbers = own_rows.scores(own_rows.kept())
    assert list(numbers) == list(own_rows.ROWS) and numbers["local"][8][0] == pytest.approx(53.2, abs=0.1)
    assert own_rows.picture(numbers) == (ROOT / "docs/images/own_rows.svg").read_text()
