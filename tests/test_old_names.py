"""Modules by the names that they had up to version 0.3: plugins of before work on."""

import importlib
import sys
import warnings

import every
import pytest

import llm_fed


def holds_what_the_new_one_does(old: str) -> None:
    new = vars(importlib.import_module(llm_fed._MOVED[old]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held = vars(importlib.import_module(old))
    assert all(held[key] is value for key, value in new.items() if key[:2] != "__")


def test_an_old_name_holds_what_the_new_one_does():
    every.passes(sorted(llm_fed._MOVED), holds_what_the_new_one_does)


def test_a_file_of_before_and_its_warning(here, monkeypatch):
    for name in {*llm_fed._MOVED} & {*sys.modules}:
        monkeypatch.delitem(sys.modules, name)  # as nobody has asked for it yet
    monkeypatch.syspath_prepend(str(here))
    (here / "mine.py").write_text(
        "from llm_fed.errors import UserError\nfrom llm_fed.messages.wire import Message\n"
        "from llm_fed.method import Method\n"
        "from llm_fed.site import Data, Site\nfrom llm_fed import signs\nimport llm_fed.shipped\n"
        "class Mine(Method):\n    def init(self, server: Site) -> Message:\n        return server.initial()\n"
    )
    with pytest.warns(DeprecationWarning, match="llm_fed.errors is llm_fed.basics.errors now"):
        importlib.import_module("mine")
