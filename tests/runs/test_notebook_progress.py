"""In a notebook progress is lines, as in a log file, and a result shows itself as a table."""

import sys
import types

import pytest

from llm_fed.basics import terminal
from llm_fed.commands.api import open_run
from llm_fed.runs.tracking import Reporter


@pytest.mark.parametrize(("shell", "is_one"), [(types.SimpleNamespace(kernel=object()), True), (object(), False)])
def test_only_a_kernel_is_a_notebook_and_no_bar_moves_there(monkeypatch, shell, is_one):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0)))
    monkeypatch.setenv("FORCE_COLOR", "1")  # what a kernel writes to may call itself a terminal
    assert terminal.in_notebook() is is_one and Reporter().console.is_terminal is not is_one
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not terminal.in_notebook()


def test_a_result_shows_itself(finished):
    """A table with base and rule; `repr` is one short line."""
    result = open_run(finished)
    html = result._repr_html_()
    for part in (">base<", ">rule<", ">fedmerge<", ">ada<", "worst half"):
        assert part in html
    assert "<script" not in html and "<style" not in html
    assert repr(result).startswith("Result(fedmerge, rouge1 ") and len(repr(result)) < 100 + len(str(finished))
