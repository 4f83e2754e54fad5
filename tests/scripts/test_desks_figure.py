"""The bars of the five desks: those of the page's first table, as the script draws them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_picture_is_that_of_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/figures"))
    import desks

    page = desks.PAGE.read_text()
    numbers = desks.figures(page)
    assert numbers["local"] == (73.4, 67.1) and list(numbers) == list(desks.ROWS)
    assert desks.picture(numbers) == (ROOT / "docs/images/desks.svg").read_text()
    with pytest.raises(LookupError, match="no row of fedit"):
        desks.figures(page.replace("| `fedit` |", "| `fedavg` |"))
