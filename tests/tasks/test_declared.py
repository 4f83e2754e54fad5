"""What a source declares beside its cells is used, named, or refused: names of classes, transforms, hidden columns,
keys in the names of folders, splits of a README, the index of a frame; in every form of source."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.feather
import pytest
import torch

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.rows import BadRow, Source, file_rows, part_rows
from llm_fed.rows.declared import shown
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks import given, labelled
from llm_fed.tasks.examples import Scheme

NAMES = ["positive", "negative"]  # not in natural order
TEXTS = [f"crate {n}" for n in range(12)]
NUMBERS = [0, 1, 1, -1, 0, 1]
SAID = ["positive", "negative", "negative", None, "positive", "negative"]
README = """---
dataset_info:
  features:
  - {name: text, dtype: string}
  - {name: label, dtype: {class_label: {names: {'0': positive, '1': negative}}}}
---
"""


def declared(labels: list[int | None], names: list[str] = NAMES) -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"text": TEXTS[: len(labels)], "label": labels}, features=features)


def saved(rows: datasets.Dataset, folder: Path) -> Path:
    rows.save_to_disk(folder / "saved")
    return next((folder / "saved").glob("*.arrow"))


def written(rows: datasets.Dataset, path: Path) -> Path:
    getattr(rows, f"to_{'json' if path.suffix == '.jsonl' else path.suffix[1:]}")(path)
    return path


def of_readme(rows: datasets.Dataset, path: Path) -> Any:
    (path.parent / "README.md").write_text(README)
    return of_folder(rows, path)


def of_folder(rows: datasets.Dataset, path: Path) -> Source:
    """The source that a run reads from a folder laid out as on the Hub."""
    written(rows, path)
    root, layout = tasks.files.plan_of(path.parent, ColumnsConfig())
    return file_rows(root / path.name, features=layout.features)


FORMS = {
    "object": lambda rows, folder: rows,
    "streamed": lambda rows, folder: rows.to_iterable_dataset(),
    "tensors": lambda rows, folder: rows.with_format("numpy"),
    "Arrow table": lambda rows, folder: rows.data.table,
    "Hub": lambda rows, folder: part_rows("a/b (train)", rows),
    "Parquet": lambda rows, folder: written(rows, folder / "a.parquet"),
    "Arrow": lambda rows, folder: saved(rows, folder),
    "README, JSON": lambda rows, folder: of_readme(rows, folder / "train.jsonl"),
    "README, CSV": lambda rows, folder: of_readme(rows, folder / "train.csv"),
}


def rows_of(source: Any) -> list[Any]:
    if isinstance(source, Path):
        return list(file_rows(source))
    return list(source if isinstance(source, Source) else given.object_rows("data['a']", source))


def test_an_object_with_an_index_is_read_by_it():
    handed = type("Handed", (list,), {"__iter__": lambda rows: rows, "__next__": list.pop})
    assert [row.values["a"] for row in rows_of(handed([{"a": 1}, {"a": 2}]))] == [1, 2]


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_classes_have_the_names_that_are_declared(form, tmp_path):
    assert [row.values["label"] for row in rows_of(FORMS[form](declared(NUMBERS), tmp_path))] == SAID


@pytest.mark.parametrize("form", [form for form in FORMS if "README" not in form])
def test_names_within_lists_and_structures(form, tmp_path):
    tag = datasets.ClassLabel(names=NAMES)
    features = datasets.Features({"tags": datasets.List(tag), "judge": {"says": tag}, "n": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"tags": [[0, 1], []], "judge": [{"says": 1}] * 2, "n": [0, 1]}, features)
    assert [row.values for row in rows_of(FORMS[form](rows, tmp_path))] == [
        {"tags": NAMES, "judge": {"says": "negative"}, "n": 0}, {"tags": [], "judge": {"says": "negative"}, "n": 1},
    ]  # fmt: skip


@pytest.mark.parametrize("names, number", [(NAMES, 2), (NAMES, -2), (["positive", ""], 1)])
def test_a_number_without_a_name_is_a_bad_row(tmp_path, names, number):
    table = declared([0, 0, 0], names).data.table  # of a file that another program has written on
    metadata = table.schema.metadata
    table = table.set_column(1, "label", pyarrow.array([0, 0, number])).replace_schema_metadata(metadata)
    pyarrow.feather.write_feather(table, tmp_path / "a.feather")
    *good, bad = rows_of(tmp_path / "a.feather")
    assert [row.values["label"] for row in good] == ["positive"] * 2
    assert isinstance(bad, BadRow) and f"holds {number}, but the data set names 2 classes" in str(bad)


def test_classes_are_trained_under_their_names(tmp_path):
    for client in ("north", "south"):
        (tmp_path / client).mkdir()
        declared([0, 1] * 6).to_parquet(tmp_path / client / "train.parquet")
    data = labelled.load(TaskConfig("classification", path=str(tmp_path)), 0)
    assert data.labels == ("negative", "positive")
    assert [each.answers for each in data.clients["north"].train[:2]] == [("positive",), ("negative",)]


RAW = datasets.Dataset.from_dict({"question": ["Of Ann?", "Of Bob?"], "answer": ["1", "2"], "note": ["Ann", "Bob"]})
SHOWN = ["question", "answer"]


def without_names(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"question": ["Of NAME?" for _ in batch["question"]], "answer": batch["answer"]}


@pytest.mark.parametrize(
    "table, questions, columns",
    [
        (RAW.with_transform(without_names), ["Of NAME?", "Of NAME?"], {*SHOWN}),
        (RAW.with_format("python", columns=SHOWN), ["Of Ann?", "Of Bob?"], {*SHOWN}),
        (RAW.with_format("numpy", columns=SHOWN), ["Of Ann?", "Of Bob?"], {*SHOWN}),
        (RAW.with_format("numpy", columns=SHOWN, output_all_columns=True), ["Of Ann?", "Of Bob?"], {*SHOWN, "note"}),
        (RAW.with_format("pandas"), ["Of Ann?", "Of Bob?"], {*SHOWN, "note"}),
        (RAW, ["Of Ann?", "Of Bob?"], {*SHOWN, "note"}),
    ],
    ids=["transform", "hidden", "hidden tensors", "hidden, but given", "frames", "plain"],
)
def test_rows_are_those_that_the_data_set_gives(table, questions, columns, tmp_path):
    rows = rows_of(table)
    assert [row.values["question"] for row in rows] == questions and {*rows[0].values} == columns
    assert given.checksums({"a": table}) == given.checksums({"a": [dict(row.values) for row in rows]})
    if table.format["type"] != "custom":  # a transform is not saved
        assert [row.values for row in rows_of(saved(table, tmp_path))] == [row.values for row in rows]


@pytest.mark.parametrize("change, said", [(lambda label: label, NAMES), (lambda label: "ab"[label], ["a", "b"])])
def test_numbers_that_a_transform_keeps_are_named_and_its_texts_stay(change, said):
    rows = declared([0, 1]).with_transform(lambda batch: batch | {"label": [change(label) for label in batch["label"]]})
    assert [row.values["label"] for row in rows_of(rows)] == said


def test_a_transform_that_fails_is_named_with_its_row():
    def fails(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        if batch["answer"] == ["2"]:
            raise KeyError("nobody")
        return batch

    with pytest.raises(UserError, match=r"data\['a'\]\[1\]: the data set fails to give this row: KeyError: 'nobody'"):
        rows_of(RAW.with_transform(fails))


FRAME = pd.DataFrame({"text": TEXTS})


@pytest.mark.parametrize(
    "table",
    [
        FRAME["text"], FRAME["text"][FRAME.index % 2 == 0], FRAME["text"].sample(frac=1, random_state=0),
        pd.concat([FRAME["text"][:3], FRAME["text"][:3]]), FRAME[FRAME.index % 2 == 0],
    ],
    ids=["plain", "filtered", "shuffled", "duplicate indices", "frame"],
)  # fmt: skip
def test_a_series_is_read_in_its_order_whatever_its_index(table):
    wanted = (table["text"] if isinstance(table, pd.DataFrame) else table).tolist()
    assert [row.values["text"] for row in rows_of(table)] == wanted


def test_an_index_with_a_name_is_a_column():
    frame = pd.DataFrame({"question": ["a", "b"], "answer": ["1", "2"]}, pd.Index(["north", "south"], name="client"))
    assert [row.values["client"] for row in rows_of(frame)] == ["north", "south"]


class Numbered(list):
    """As torchvision has a data set: rows with numbers, and the names of these beside them."""

    classes = tuple(NAMES)


@pytest.mark.parametrize("whole", [True, False])
def test_classes_beside_the_rows(whole):
    pairs = Numbered([("crate 0", 0), ("crate 1", 1)])
    table = pairs if whole else torch.utils.data.Subset(pairs, [0, 1])
    assert [row.values["answer"] for row in rows_of(table)] == NAMES
    pictures = Numbered([(np.zeros((4, 4), np.uint8), n % 2) for n in range(6)])
    data = given.pictures({"a": pictures if whole else torch.utils.data.Subset(pictures, range(6))}, TaskConfig(), 0)
    assert data.labels == ("positive", "negative")


def test_in_python_a_setting_is_a_text():
    with pytest.raises(UserError, match="set task.columns.answer=COLUMN"):
        given.collect({"a": [{"question": "Where?", "note": "x"}]}, TaskConfig(), Scheme)


ROWS = [{"question": f"Where is {n}?", "answer": "here"} for n in range(4)]


def keyed(root: Path, *folders: str, suffix: str = ".csv", **more: str) -> TaskConfig:
    """A folder whose folders name keys, as Spark, Arrow and DuckDB write it."""
    for folder in folders:
        (root / folder).mkdir(parents=True)
        written(datasets.Dataset.from_list([row | more for row in ROWS]), root / folder / f"part-0{suffix}")
    return TaskConfig("files", str(root), validation=0.0)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_keys_of_folders(tmp_path, suffix):
    data = tasks.load(keyed(tmp_path / "a", "site=north", "site=s%20w", suffix=suffix), 0)
    assert [*data.clients] == ["north", "s w"] and not data.reading.columns
    config = keyed(tmp_path / "b", "year=2023/site=north", "year=2024/site=north", "year=2024/site=west", suffix=suffix)
    with pytest.raises(UserError, match=r"keys year and site; .* set task.columns.client=year"):
        tasks.load(config, 0)
    by_site = tasks.load(config_with(config, client="site"), 0)
    assert {client: len(own.train) + len(own.test) for client, own in by_site.clients.items()} == {
        "north": 8,
        "west": 4,
    }
    assert [*by_site.reading.columns] == ["year"]
    assert [*tasks.load(config_with(config, client="year"), 0).clients] == ["2023", "2024"]


def config_with(config: TaskConfig, **columns: str) -> TaskConfig:
    return TaskConfig("files", config.path, validation=0.0, columns=ColumnsConfig(**columns))


def test_a_key_says_the_split_and_may_not_contradict_a_column(tmp_path):
    data = tasks.load(keyed(tmp_path / "a", "site=north/split=train", "site=north/split=test"), 0)
    assert (len(data.clients["north"].train), len(data.clients["north"].test)) == (4, 4)
    config = config_with(keyed(tmp_path / "b", "site=north", site="west"), client="site")
    with pytest.raises(UserError, match="line 2: column 'site' holds 'west', but the name of its folder 'north'"):
        tasks.load(config, 0)


def test_what_a_readme_says_of_splits(tmp_path):
    """Its files are those of all clients then, as on the Hub, where their names would say something else."""
    for name in ("a", "b"):
        lines = (json.dumps(row | {"client": f"{name}{n % 2}"}) for n, row in enumerate(ROWS))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    said = "configs:\n- config_name: default\n  data_files:\n  - {split: train, path: a.jsonl}\n"
    (tmp_path / "README.md").write_text(f"---\n{said}  - {{split: test, path: b.jsonl}}\n---\n")
    data = tasks.load(TaskConfig("files", str(tmp_path), validation=0.0), 0)
    assert {id: (len(own.train), len(own.test)) for id, own in data.clients.items()} == {
        "a0": (2, 0), "a1": (2, 0), "b0": (0, 2), "b1": (0, 2),
    }  # fmt: skip
    (tmp_path / "README.md").write_text(f"---\n{said}  - {{split: test, path: c.jsonl}}\n---\n")
    with pytest.raises(
        UserError, match="README.md says what the data are .* c.jsonl of the split test are no files; correct"
    ):
        tasks.load(TaskConfig("files", str(tmp_path)), 0)
    for other in ("", "- config_name: more\n  data_files: more.csv\n"):  # one that does not say it
        (tmp_path / "README.md").write_text(f"---\n{said.partition('  - {')[0]}  - a.jsonl\n{other}---\n")
        assert {*tasks.load(config_with(TaskConfig("files", str(tmp_path)), client="client"), 0).clients} == {
            "a0", "a1", "b0", "b1",
        }  # fmt: skip


def test_a_strangers_readme_makes_no_much_of_little_and_a_pipe_is_not_waited_for(tmp_path):
    written(declared([0, 1]), tmp_path / "train.jsonl")
    bomb = "\n".join(f"n{n}: &n{n} [{', '.join([f'*n{n - 1}'] * 9)}]" for n in range(1, 12))
    (tmp_path / "README.md").write_text(f"---\nn0: &n0 [x]\n{bomb}\nconfigs: *n11\n---\n")
    with pytest.raises(UserError, match="README.md says what the data are in a form that cannot be read: .*aliases"):
        tasks.files.plan_of(tmp_path, ColumnsConfig())
    os.mkfifo(tmp_path / "state.json")
    assert shown(tmp_path / "train.jsonl") is None
