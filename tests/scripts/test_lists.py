"""The pages that list methods, tasks and settings are what the classes and tables say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
