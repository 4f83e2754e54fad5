"""`task.groups`: which natural clients take part, in every task; and Flan's two sizes."""

import pytest
from datasets import Dataset, DatasetDict
from jsonl import records, write

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import PartitionConfig, TaskConfig
from llm_fed.tasks import flan


def test_groups_choose_and_order_folders_before_the_partition_and_the_limit(tmp_path):
    for name in ("ada", "bob", "cyd"):
        write(tmp_path / name / "train.jsonl", records(8))
        write(tmp_path / name / "test.jsonl", records(4))
    config = TaskConfig(name="files", path=str(tmp_path), groups=("cyd", "ada"))
    assert list(tasks.load(config, 0).clients) == ["cyd", "ada"]
    halves = TaskConfig(name="files", path=str(tmp_path), groups=("cyd", "ada"), clients=3,
                        partition=PartitionConfig(kind="split", clients=2))  # fmt: skip
    assert list(tasks.load(halves, 0).clients) == ["cyd-0", "cyd-1", "ada-0"]
    with pytest.raises(UserError, match="task.groups='cid' is unknown .the closest is 'cyd'.; known: ada, bob, cyd"):
        tasks.load(TaskConfig(name="files", path=str(tmp_path), groups=("ada", "cid")), 0)


def test_an_empty_list_of_groups_is_refused():
    with pytest.raises(UserError, match="task.groups is empty"):
        tasks.load(TaskConfig(name="planted", groups=()), 0)


@pytest.fixture
def hub(monkeypatch):
    def load_dataset(name, data_files):
        made = {s: [{"inputs": f"{s} {i}", "targets": "no"} for i in range(2500 if s == "train" else 250)]
                for s in data_files}  # fmt: skip
        return DatasetDict({split: Dataset.from_list(part) for split, part in made.items()})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)


def test_flan_in_two_sizes(hub, caplog):
    small = tasks.load(TaskConfig(name="flan", groups=("rte", "wic"), validation=0.0), 0)
    assert {n: (len(c.train), len(c.test)) for n, c in small.clients.items()} == {"rte": (300, 200), "wic": (300, 200)}
    assert not caplog.text
    other = tasks.load(TaskConfig(name="flan", groups=("rte", "wic"), validation=0.0), 1)
    assert other.clients["wic"].test != small.clients["wic"].test
    large = tasks.load(TaskConfig(name="flan-2000", validation=0.0), 0)
    assert (large.name, tuple(large.clients)) == ("flan-2000", flan.TASKS_2000)
    assert {(len(c.train), len(c.test)) for c in large.clients.values()} == {(2000, 250)}
    assert "flan sst2 test: all 250 examples are taken, fewer than the 300 wanted" in caplog.text


def test_which_clients_come_with_the_data():
    """Those of a partition and of the planted federation are drawn with a seed."""
    assert tasks.natural(TaskConfig(name="files")) and tasks.natural(TaskConfig(name="flan"))
    assert not tasks.natural(TaskConfig(name="files", partition=PartitionConfig("iid", clients=3)))
    assert not tasks.natural(TaskConfig(name="planted"))
