"""GLUE by name, from a folder laid out like the Hub's, and through `datasets.load_dataset`."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import PartitionConfig, TaskConfig
from llm_fed.tasks import glue


def made(part: glue.GluePart, count: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows of a task as the Hub has them."""
    numbers = part.labels == ("number",)
    return [
        {**{name: f"{name} {first + n}" for name in part.texts}, "label": n / 2 if numbers else n % len(part.labels),
         "idx": n}
        for n in range(count)
    ]  # fmt: skip


def folder(place: Path, name: str, ending: str = "jsonl") -> Path:
    part = glue.PARTS[name]
    inner = place / (part.folder or name)
    inner.mkdir(parents=True)
    for split, count in (("train", 24), (part.test, 9), ("test", 5)):
        lines = made(part, count, 100 * len(split))
        if ending == "parquet":
            datasets.Dataset.from_list(lines).to_parquet(inner / f"{split}-00000-of-00001.parquet")
        else:
            (inner / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place


@pytest.mark.parametrize("name", glue.PARTS)
def test_each_task_is_read_from_a_folder(tmp_path, name):
    partition = PartitionConfig("dirichlet" if name != "stsb" else "iid", clients=3)
    data = tasks.load(TaskConfig(name, str(folder(tmp_path, name)), partition=partition), 0)
    part = glue.PARTS[name]
    assert (data.labels, data.metric, len(data.clients)) == (part.labels, part.metric, 3)
    assert sum(len(client.test) for client in data.clients.values()) == 9  # the validation split
    assert bool(next(iter(data.clients.values())).train[0].pair) == (len(part.texts) == 2)


def test_the_hub_is_asked_by_name(monkeypatch):
    asked: list[Any] = []

    def load_dataset(source: str, **options: Any) -> datasets.DatasetDict:
        asked.append((source, options))
        part = glue.PARTS["mnli"]
        splits = {"train": 12, "validation_matched": 6, "validation_mismatched": 3, "test_matched": 2}
        return datasets.DatasetDict({split: datasets.Dataset.from_list(made(part, n)) for split, n in splits.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = tasks.load(TaskConfig("mnli-mm", partition=PartitionConfig("iid", clients=3)), 0)
    assert asked == [("nyu-mll/glue", {"name": "mnli"})]
    assert sum(len(client.test) for client in data.clients.values()) == 3


def test_what_is_missing_is_named(tmp_path):
    place = folder(tmp_path, "sst2")
    (place / "sst2/validation.jsonl").unlink()
    with pytest.raises(UserError, match="sst2 has no file validation.jsonl.*which sst2 needs"):
        tasks.load(TaskConfig("sst2", str(place)), 0)
    with pytest.raises(UserError, match="the labels of sst2 are negative, positive; leave it out"):
        tasks.load(TaskConfig("sst2", str(place), labels=("a", "b")), 0)
