"""GLUE (Wang et al. 2019): eight tasks of labels and one of numbers, each by its name.

A row of `sst2`: {"sentence": "a smart, witty follow-up", "label": 1, "idx": 12}

Source: `nyu-mll/glue` on the Hub, or `task.path`, a folder with the same files (`train-*.parquet`, `validation.jsonl`,
...), or with a folder of the task's name that has them. The labels of GLUE's own test splits are not public, so the
validation split is the test split, as in the papers; of MNLI it is the matched one, and of `mnli-mm` the mismatched
one. There is one natural client, which `task.partition` divides. Not yet run against the Hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llm_fed.basics.errors import UserError
from llm_fed.rows import Source, file_rows, hub_data, part_rows
from llm_fed.settings.config import NUMBER, ColumnsConfig, TaskConfig
from llm_fed.tasks.collected import ALL, Collected
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.files import local_folder
from llm_fed.tasks.labelled import CLASSIFICATION, KIND, REGRESSION, LabelScheme, NumberScheme

HUB_ID = "nyu-mll/glue"
_ENTAILED = ("entailment", "not_entailment")
_MNLI = ("entailment", "neutral", "contradiction")
_TWO = ("sentence1", "sentence2")


@dataclass(frozen=True)
class GluePart:
    """One of GLUE's tasks."""

    texts: tuple[str, ...]  # their columns
    labels: tuple[str, ...]  # names by number
    metric: str = CLASSIFICATION
    test: str = "validation"  # the split
    folder: str = ""  # the Hub's name, where it is another


PARTS = {
    "cola": GluePart(("sentence",), ("unacceptable", "acceptable"), "matthews"),
    "sst2": GluePart(("sentence",), ("negative", "positive")),
    "mrpc": GluePart(_TWO, ("not_equivalent", "equivalent")),
    "stsb": GluePart(_TWO, (NUMBER,), REGRESSION),
    "qqp": GluePart(("question1", "question2"), ("not_duplicate", "duplicate")),
    "mnli": GluePart(("premise", "hypothesis"), _MNLI, test="validation_matched"),
    "mnli-mm": GluePart(("premise", "hypothesis"), _MNLI, test="validation_mismatched", folder="mnli"),
    "qnli": GluePart(("question", "sentence"), _ENTAILED),
    "rte": GluePart(_TWO, _ENTAILED),
    "wnli": GluePart(_TWO, ("not_entailment", "entailment")),
}


def load(config: TaskConfig, seed: int) -> TaskData:
    part = PARTS[config.name]
    if config.labels is not None:
        raise UserError(f"task.labels: the labels of {config.name} are {', '.join(part.labels)}; leave it out")
    first, *second = part.texts
    columns = ColumnsConfig(prompt=first, input=next(iter(second), None), answer="label")
    scheme = NumberScheme if part.labels == (NUMBER,) else LabelScheme
    collected = Collected(replace(config, columns=columns), config.path or HUB_ID, scheme=scheme)
    for split, sources in _sources(config, part).items():
        collected.add(ALL, split, sources)
    clients, reading = collected.clients(), collected.reading.checked()
    return TaskData(config.name, part.metric, clients, part.labels, reading=reading, kind=KIND)


def _sources(config: TaskConfig, part: GluePart) -> Mapping[str, list[Source]]:
    """By split the rows that are trained and tested on."""
    folder = part.folder or config.name
    wanted = {"train": "train", "test": part.test}
    if config.path is None:
        data = hub_data(HUB_ID, name=folder)
        if missing := [name for name in wanted.values() if name not in data]:
            raise UserError(f"the Hub data set {HUB_ID} ({folder}) has no split {missing[0]}, but {', '.join(data)}")
        return {split: [part_rows(f"{HUB_ID} ({folder}, {name})", data[name])] for split, name in wanted.items()}
    path = local_folder(config)
    path = path / folder if (path / folder).is_dir() else path
    return {split: _files(path, name, config.name) for split, name in wanted.items()}


def _files(folder: Path, split: str, task: str) -> list[Source]:
    """The files of a split, such as `validation.jsonl` or `validation-00000-of-00001.parquet`."""
    found = [path for path in sorted(folder.iterdir()) if path.name.partition(".")[0].partition("-")[0] == split]
    if not found:
        raise UserError(f"{folder} has no file {split}.jsonl, {split}.csv or {split}-*.parquet, which {task} needs")
    return [file_rows(path) for path in found]
