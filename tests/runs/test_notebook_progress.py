"""Progress in a notebook is one line that is replaced; nothing is printed beside it. IPython is a stand-in here."""

import sys
import types

import pytest

from llm_fed.basics import terminal
from llm_fed.commands.api import open_run
from llm_fed.experiment import run as experiment
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile


class Handle:
    def __init__(self, shown: list):
        self.shown = shown

    def update(self, bundle, raw):
        self.shown.append(bundle)


@pytest.fixture
def shown(monkeypatch) -> list:
    """What a cell has shown so far: each a bundle that has replaced the one before."""
    bundles: list = []
    calls: list = []

    def display(bundle, raw, display_id):
        calls.append(bundle)
        assert raw and display_id and len(calls) == 1  # one place, which is updated
        bundles.append(bundle)
        return Handle(bundles)

    shell, module = types.SimpleNamespace(kernel=object()), types.SimpleNamespace(display=display)
    ipython = types.SimpleNamespace(version_info=(9, 0), get_ipython=lambda: shell, display=module)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return bundles


def test_only_a_kernel_is_a_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert terminal.display_of_notebook() is None
    in_terminal = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", in_terminal)
    assert terminal.display_of_notebook() is None


def test_a_run_is_one_line(small, tmp_path, shown, capfd):
    reporter = Reporter(interval=0.01)
    experiment.train(configfile.from_dict(small.as_usual().tree(rounds=2)), tmp_path / "run", reporter=reporter)
    said = capfd.readouterr()
    assert said.out == "" and "round" not in said.err  # but what transformers says when it loads
    assert not reporter.console.is_terminal  # though the stream of a kernel may say that it is one
    assert all(bundle["text/plain"].count("\n") == 0 for bundle in shown)
    log = shown[-1]["text/html"]
    assert log.startswith("<details><summary>") and "clients    3" in log and "round 2/2: loss" in log


def test_what_went_wrong_stays_to_be_seen(shown):
    reporter = Reporter()
    event = {"kind": "event", "round": 1, "client": "<b>", "event": "client failed", "reason": "no room"}
    reporter.record(event)
    reporter.note("round 2/2")
    assert shown[-1]["text/plain"] == "round 1: <b>: client failed: no room\nround 2/2"
    assert shown[-1]["text/html"].startswith("<div>round 1: &lt;b&gt;: client failed: no room</div><details>")


def test_a_result_shows_itself(finished):
    """A table with base and rule; `repr` is one short line."""
    result = open_run(finished)
    html = result._repr_html_()
    for part in (">base<", ">rule<", ">fedmerge<", ">ada<", "worst half"):
        assert part in html
    assert "<script" not in html and "<style" not in html
    assert repr(result).startswith("Result(fedmerge, rouge1 ") and len(repr(result)) < 100 + len(str(finished))
