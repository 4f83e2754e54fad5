"""What links lead to stays as it is: a few of the places where commands write; `tests/support/links.py` tries all."""

from __future__ import annotations

import links
import pytest


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> links.Links:
    return links.Links(tmp_path_factory.mktemp("links"))


@pytest.mark.parametrize(
    ("command", "place", "target"),
    [
        ("cross", "cross.json", "file"),
        ("cross", ".cross.json.partial", "file"),  # the name that was used once
        ("cross", "report.html", "nothing"),
        ("run", "timing.jsonl", "file"),
        ("run", "metrics.jsonl", "file"),
        ("run", ".lock", "file"),
        ("run", ".lock", "nothing"),
        ("run", ".lock.1", "nothing"),
        ("run", "checkpoints", "folder"),
        ("run", "checkpoints/rows", "folder"),
        ("run", "adapters", "folder"),
        ("fresh", "adapters", "folder"),
        ("fresh", "checkpoints/round-0002", "folder"),
        ("continue", "checkpoints/.round-0002.partial", "folder"),
        ("continue", "digests.jsonl", "file"),
        ("continue", "adapters/ada", "folder"),
        ("continue", "adapters/.ada.partial", "folder"),
        ("export", "copies/ada", "folder"),
        ("export", "copies/.ada.partial", "folder"),
        ("runs", "verdict/verdict.md", "file"),
    ],
)
def test_what_a_link_leads_to_stays_as_it_is(tried, command, place, target):
    assert tried.check(command, place, target) == ""
