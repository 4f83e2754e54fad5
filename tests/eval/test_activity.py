"""The picture of clients over time: what it holds of a run's lines, and that it can be drawn."""

import numpy as np

from llm_fed.eval import activity, plots


def test_a_cell_has_the_cosine_and_the_norm_over_the_rounds_median():
    """The norms of round 2 are 1, 2 and 6, whose median is 2; `b` was not in round 5."""
    lines = [
        {"round": 2, "updates": {"a": [1.0, 0.5], "b": [2.0, None], "c": [6.0, -0.5]}},
        {"round": 3},
        {"round": 5, "updates": {"a": [3.0, 1.0], "c": [3.0, 1.0]}},
    ]
    found = activity.updates_of(lines)
    assert found is not None and (list(found.clients), list(found.rounds)) == (["a", "b", "c"], [2, 5])
    np.testing.assert_allclose(found.norms, [[0.5, 1], [1, np.nan], [3, 1]])
    np.testing.assert_allclose(found.cosines, [[0.5, 1], [np.nan, np.nan], [-0.5, 1]])


def test_of_many_clients_those_are_shown_that_differ_most():
    """Twenty in direction; round by round they come in another order."""
    updates = {f"c{number:03d}": [1.0, 1 - number / 100] for number in range(100)}
    found = activity.updates_of([{"round": 1, "updates": dict(reversed(updates.items()))}])
    assert found is not None and list(found.clients) == [f"c{number:03d}" for number in range(80, 100)]
    assert found.left_out == 80


def test_both_pictures_are_drawn(tmp_path):
    found = activity.updates_of([{"round": r, "updates": {"a": [0.0, None], "b": [0.0, None]}} for r in (1, 2)])
    assert found is not None and activity.draw(tmp_path / "a.png", updates=found).stat().st_size > 1000
    options = {"metric": "rouge1", "test": (2, 60.0), "after": ("own steps", 55.0)}
    assert plots.plot_scores(tmp_path / "b.png", [1, 2], [9.0, 13.9], [1.0, 2.0], **options).stat().st_size > 1000
