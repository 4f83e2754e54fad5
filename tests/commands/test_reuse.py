"""What the runs of a comparison share of their data changes no run: each equals one in a process of its own."""

from pathlib import Path

import equal_runs
import every
import pytest
import small_run

from llm_fed import tasks
from llm_fed.commands import compare, section
from llm_fed.experiment import finish, run
from llm_fed.kinds.kind import Reuse
from llm_fed.settings import configfile
from llm_fed.settings.config import TaskConfig


@pytest.fixture
def counted(monkeypatch) -> dict[str, int]:
    """How often data were read."""
    counts, load = {"read": 0}, tasks.load

    def loading(*given, **options):
        counts["read"] += 1
        return load(*given, **options)

    monkeypatch.setattr(tasks, "load", loading)
    return counts


@pytest.mark.parametrize("captured", every.quick(["auto", "on"], ["on"]))
def test_runs_of_a_comparison_equal_runs_alone(small, tmp_path, counted, monkeypatch, captured):
    """Byte for byte, with two methods and two seeds that hold other rows out; the data are read once for each seed,
    beside once to load the base. Runs whose passes are captured share graphs, too."""
    monkeypatch.setattr(finish, "write_report", lambda folder: None)
    data = small_run.write_data(tmp_path / "data", {"train": 11})
    task, quick = {"path": str(data), "validation": 0.4}, {"max_new_tokens": 1, "cross": False}
    path = small.config(tmp_path / "c.yaml", rounds=2, task=task, eval=quick)
    out = tmp_path / "out"
    rows = section.read_rows(path, [f"engine.fast={captured}"], ["fedit", "local"], [0, 1])
    compare.compare(rows, out)
    shared = counted["read"]
    folders = sorted(config.parent for config in out.glob("*/config.yaml"))
    assert len(folders) == 4
    for folder in folders:
        counted.update(read=0)
        alone = tmp_path / "alone" / folder.name
        run.train(configfile.load(folder / "config.yaml"), alone)
        ours, its = (equal_runs.without_neighbours(equal_runs.files(each)) for each in (folder, alone))
        assert ours.keys() == its.keys() and len(ours) > 5
        assert [name for name in ours if ours[name] != its[name]] == []
    assert len({(folder / "splits.json").read_bytes() for folder in folders}) == 2
    assert (counted["read"], shared) == (1, 1 + 2)  # the former of one run alone


def test_a_run_that_knows_rows_is_given_them_anew(small, counted):
    """They keep their splits, which another run's rows do not."""
    config, shared = TaskConfig("files", str(small.data), template="plain"), Reuse()
    first = shared.task(config, 0, 0, None, absent=False)
    assert shared.task(config, 0, 0, None, absent=False) is first and counted["read"] == 1
    assert shared.task(config, 0, 0, first.record, absent=False) is not first and counted["read"] == 2
    assert shared.task(config, 1, 0, None, absent=False) is not first and counted["read"] == 3
    assert shared.task(config, 0, 0, None, absent=False) is not first and counted["read"] == 4


def test_a_base_outside_of_comparisons_keeps_nothing(small):
    from llm_fed.bench.bases import Bases

    config = configfile.load(small.tree())
    assert Bases().of(config).reuse is None and Bases(reuse=True).of(config).reuse is not None
    assert isinstance(small.data, Path)
