"""The pages that list methods, tasks and settings are what the classes and tables say."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_pages_are_as_the_script_writes_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("lists", ROOT / "scripts/lists.py")
    assert spec and spec.loader
    lists = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lists)
    for name, text in lists.pages().items():
        assert (ROOT / "docs" / name).read_text() == text, "run: python scripts/lists.py"
        assert len(text.splitlines()) <= 200
        assert all(len(line) <= 120 or line.startswith("|") for line in text.splitlines())


def test_a_message_that_the_code_has_not_or_has_twice_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import messages

    for piece in ("no error says this", "; correct it, or drop the row"):
        with pytest.raises(LookupError, match="correct scripts/messages.yaml"):
            messages._only(piece, messages.collected())


def test_a_method_without_a_row_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import lists

    known = lists.methods.builtin()
    monkeypatch.setattr(lists.methods, "builtin", lambda: [each for each in known if each["name"] != "fedit"])
    with pytest.raises(LookupError, match="differ in .'fedit'."):
        lists.methods_page()
