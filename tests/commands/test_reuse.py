"""What the runs of a comparison share changes no run: each equals one in a process of its own."""

import equal_runs
import every
import pytest
import small_run

from llm_fed.commands import compare, section
from llm_fed.experiment import run
from llm_fed.settings import configfile


@pytest.mark.parametrize("captured", every.quick(["auto", "on"], ["on"]))
def test_runs_of_a_comparison_equal_runs_alone(small, tmp_path, captured):
    """Byte for byte, with two methods and two seeds that hold other rows out. Runs whose passes are captured share
    graphs."""
    data = small_run.write_data(tmp_path / "data", {"train": 11})
    task, quick = {"path": str(data), "validation": 0.4}, {"max_new_tokens": 1, "cross": False}
    path = small.config(tmp_path / "c.yaml", rounds=2, task=task, eval=quick)
    out = tmp_path / "out"
    rows = section.read_rows(path, [f"engine.fast={captured}"], ["fedit", "local"], [0, 1])
    compare.compare(rows, out)
    folders = sorted(config.parent for config in out.glob("*/config.yaml"))
    assert len(folders) == 4
    for folder in folders:
        alone = tmp_path / "alone" / folder.name
        run.train(configfile.load(folder / "config.yaml"), alone)
        ours, its = (equal_runs.without_neighbours(equal_runs.files(each)) for each in (folder, alone))
        assert ours.keys() == its.keys() and len(ours) > 5
        assert [name for name in ours if ours[name] != its[name]] == []
    assert len({(folder / "splits.json").read_bytes() for folder in folders}) == 2


def test_a_base_outside_of_comparisons_keeps_nothing(small):
    from llm_fed.bench.bases import Bases

    config = configfile.load(small.tree())
    assert Bases().of(config).captures is None and Bases(reuse=True).of(config).captures is not None
