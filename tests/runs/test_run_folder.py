"""A run folder that another configuration finds: taken over, or left alone."""

from __future__ import annotations

import pytest
import toy

from llm_fed.errors import UserError
from llm_fed.runs.folder import Run, saved_config


def test_a_run_that_was_refused_before_its_first_round_makes_room(tmp_path):
    """What a run writes before it is refused: trackers, network.json, a needed run as far as that."""
    with Run(tmp_path, toy.config()) as run:
        run.begin()
        run.remember("network.json", {"run": "before"})
    for name in ("trackers/events", "needs/local/config.yaml", "needs/local/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with Run(tmp_path, toy.config(rounds=4, local={"lr": 0.1})) as run:
        run.begin()
    assert saved_config(tmp_path)["local"]["lr"] == 0.1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoints", "config.yaml"]


@pytest.mark.parametrize(
    "result", ["metrics.jsonl", "checkpoints/round-0001/manifest.json", "needs/local/summary.json"]
)
def test_whatever_has_results_is_not_taken_over(tmp_path, result):
    with Run(tmp_path, toy.config()) as run:
        run.begin()
    (tmp_path / result).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / result).write_text("{}")
    with pytest.raises(UserError, match="another configuration"), Run(tmp_path, toy.config(local={"lr": 0.1})):
        pass
    assert (tmp_path / result).read_text() == "{}"
