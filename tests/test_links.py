"""What links lead to stays as it is, wherever commands write."""

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
        ("run", ".lock.holder", "file"),
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
        ("compare", "fedit-seed0", "folder"),
    ],
)
def test_what_a_link_leads_to_stays_as_it_is(tried, command, place, target):
    assert tried.check(command, place, target) == ""


@pytest.mark.slow
@pytest.mark.parametrize("command", links.COMMANDS)
def test_what_links_in_any_place_lead_to_stays_as_it_is(tried, command):
    found = {case: tried.check(*case) for case in tried.cases(command, most=64)}
    assert not any(found.values()), {case: wrong for case, wrong in found.items() if wrong}


def test_a_run_that_another_one_needs_is_no_link(small, llm_fed, tmp_path):
    """A lock was made in the folder that the link leads to."""
    config = small.as_usual().config(tmp_path / "c.yaml", rounds=2, method={"name": "potara"})
    (tmp_path / "victim").mkdir()
    (tmp_path / "run" / "needs").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "needs" / "fedit").symlink_to(tmp_path / "victim")
    (tmp_path / "run" / "config.yaml").write_text(config.read_text())
    llm_fed("run", config, "--out", tmp_path / "run").assert_refused("needs/fedit is a symbolic link")
    assert not [*(tmp_path / "victim").iterdir()]
