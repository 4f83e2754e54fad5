"""Tasks from files: a user's own data in every layout and format, Flan, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from jsonl import records, write

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import PartitionConfig, TaskConfig
from llm_fed.tasks import flan
from llm_fed.tasks.common import Example


def load(path: Path | str, seed: int = 0, name: str = "files", **settings: object):
    return tasks.load(TaskConfig(name=name, path=str(path), **settings), seed)  # type: ignore[arg-type]


# The task `files`


def test_folder_per_client_in_natural_order_with_gzip_and_validation(tmp_path):
    for place, name in enumerate(("client10", "client2", "client1")):
        write(tmp_path / name / "train.jsonl.gz", records(20 + 20 * place)[-20:])
        write(tmp_path / name / "test.jsonl", records(5))
    write(tmp_path / "client2" / "val.jsonl", records(3))
    (tmp_path / ".cache").mkdir()
    (tmp_path / "client5").mkdir()  # nobody has put its files there yet
    data = load(tmp_path)
    assert [*load(tmp_path, groups=("client1", "client5")).clients] == ["client1"]
    assert (data.name, data.metric, list(data.clients)) == ("files", "rouge1", ["client1", "client2", "client10"])
    sizes = {name: (len(c.train), len(c.validation), len(c.test)) for name, c in data.clients.items()}
    assert sizes["client2"] == (20, 3, 5)
    assert all(sum(sizes[name]) == 25 and 1 <= sizes[name][1] <= 6 for name in ("client1", "client10"))
    assert data.clients["client2"].train[7] == Example("question 27", ("answer 27",), (), "client2")
    assert load(tmp_path) == data
    assert load(tmp_path, seed=1) != data


def test_one_file_without_client_column_needs_a_partition(tmp_path, caplog):
    path = write(tmp_path / "all.jsonl", records(20, kind="x") + records(20, kind="y"))
    with pytest.raises(UserError, match="no column names the client of a row; set task.columns.client=COLUMN"):
        load(path)
    parts = load(path, partition=PartitionConfig(kind="iid", clients=4)).clients
    assert {len(c.train) + len(c.validation) + len(c.test) for c in parts.values()} == {10}
    assert "no test split: about 20 % of each client's training examples" in caplog.text
    parts = load(path, partition=PartitionConfig(kind="dirichlet", clients=2, label="kind", alpha=1.0)).clients
    assert {e.group for c in parts.values() for e in c.train} == {"x", "y"}
    with pytest.raises(UserError, match="line 1: task.partition.label='kin' is not a column .the closest is 'kind'"):
        load(path, partition=PartitionConfig(kind="dirichlet", clients=2, label="kin"))
    path = write(tmp_path / "all.jsonl", records(20, client="Bob") + records(20, client="bob"))
    with pytest.raises(UserError, match="client ids 'Bob' and 'bob' differ in case only"):
        load(path)
    assert load(path, partition=PartitionConfig(kind="iid", clients=2)).clients  # which names no folder after them


GOOD = '{"instruction": "a", "output": "b"}\n'


BAD = [
    (GOOD + '{"instruction": "a", "outp', r"train.jsonl, line 2: malformed JSON \(column 22: Unterminated string"),
    (GOOD + "\n[1, 2]\n", r"train.jsonl, line 3: an object with named columns is needed, got \[1, 2\]"),
    ('[{"instruction": "a"},\n {"output" "b"}]', "train.jsonl, line 2: malformed JSON .column 12: Expecting ':'"),
    ('{"instruction": "a", "output": "b", "options": ["c"]}', r"line 1: the answer 'b' is none of .*\['c'\]"),
    ('{"text": "a", "label": "b"}\n', "no column for the answer among text, label; set task.columns.answer=COLUMN"),
    ("", r"none of the clients a has a training example \(none in a/train.jsonl\)"),
    ("\u95ee\u9898\u95ee\u9898".encode("gb18030").decode("utf-8", "surrogateescape"),
     "train.jsonl is not text in UTF-8, and its letters do not tell what it is; convert it"),
]  # fmt: skip


@pytest.mark.parametrize("train, message", BAD)
def test_bad_content_is_refused_with_file_and_line(tmp_path, train, message):
    write(tmp_path / "a" / "test.jsonl", records(1))
    (tmp_path / "a" / "train.jsonl").write_text(train, errors="surrogateescape")
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value) and "train.jsonl" in str(caught.value)


def test_missing_and_ambiguous_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="task.path is not set"):
        tasks.load(TaskConfig(name="files"), 0)
    with pytest.raises(UserError, match="/nowhere': there is no such file or folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no client folder and no file of examples"):
        load(tmp_path)
    (tmp_path / "notes.odt").write_text("hello")
    with pytest.raises(UserError, match="holds no client folder and no file of examples .*; it holds notes.odt$"):
        load(tmp_path)
    with pytest.raises(UserError, match="notes.odt cannot be read; supported are JSONL"):
        load(tmp_path / "notes.odt")
    write(tmp_path / "a" / "train.jsonl", records(2))
    write(tmp_path / "b" / "test.jsonl", records(2))
    loaded = load(tmp_path)
    assert (list(loaded.clients), loaded.everybody, len(loaded.clients["b"].test)) == (["a", "b"], ("a", "b"), 2)
    (tmp_path / "b" / "test.jsonl").unlink()
    assert load(tmp_path).reading.for_people() == {"not used": "b/, notes.odt"}
    for number in range(5):
        (tmp_path / f"n{number}.odt").touch()
    assert load(tmp_path).reading.for_people()["not used"].endswith("n3.odt and 2 more")
    (tmp_path / "n4.odt").unlink()
    assert load(tmp_path).reading.for_people()["not used"].endswith("n3.odt, notes.odt")


def test_a_client_may_have_training_or_test_examples_alone(tmp_path):
    write(tmp_path / "train.jsonl", records(3, client="a") + records(3, client="c"))
    write(tmp_path / "test.jsonl", records(1, client="a") + records(1, client="b"))
    write(tmp_path / "validation.jsonl", records(1, client="d"))
    data = load(tmp_path, validation=0.0)
    assert [(id, len(c.train), len(c.test)) for id, c in data.clients.items()] == [
        ("a", 3, 1),
        ("b", 0, 1),
        ("c", 3, 0),
    ]
    assert data.everybody == ("a", "b", "c", "d")  # of whom one has no use
    with pytest.raises(UserError, match="none of the clients d has a training example; add some"):
        load(tmp_path, groups=("d",))


def test_groups_may_be_absent_where_data_can_go_away(tmp_path):
    path = write(tmp_path / "all.jsonl", records(4, client="a") + records(4, client="b"))
    config = TaskConfig("files", str(path), groups=("b", "gone"))
    with pytest.raises(UserError, match="task.groups='gone' is unknown"):
        tasks.load(config, 0)
    found = tasks.load(config, 0, absent=True)
    assert (list(found.clients), found.everybody) == (["b"], ("b", "gone"))
    with pytest.raises(UserError, match="task.groups='gone' is unknown"):
        tasks.load(replace(config, groups=("gone",)), 0, absent=True)


def test_hub_data_set(monkeypatch):
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options))
        train = Dataset.from_list(records(6, client="a") + records(6, client="b"))
        return DatasetDict(train=train, test=Dataset.from_list(records(2, client="a") + records(2, client="b")))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    data = load("hf://somebody/questions", validation=0.5)
    assert asked == [("somebody/questions", {})]
    assert [(len(c.train), len(c.validation), len(c.test)) for c in data.clients.values()] == [(3, 3, 2)] * 2


def test_hub_failure_says_what_the_hub_said(monkeypatch):
    def load_dataset(name, **options):
        raise ConnectionError("Couldn't reach the Hub\nmore")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(UserError, match="the Hub data set 'some/thing' cannot be read: Couldn't reach the Hub$"):
        load("hf://some/thing")


# The task `flan`


def test_flan_folder_strips_the_prefix_and_keeps_the_order(tmp_path):
    prompt = "Is it?\nOPTIONS:\n- no\n- yes"
    for name in ("client10_wic", "client9_snli"):
        for split in ("train", "test"):
            write(tmp_path / name / f"{split}.jsonl", [{"instruction": prompt, "output": "no"}])
    data = load(tmp_path, name="flan")
    assert (data.name, data.metric, list(data.clients)) == ("flan", "rouge1", ["snli", "wic"])
    assert data.clients["wic"].test == (Example(prompt, ("no",), ("no", "yes"), "wic"),)
    write(tmp_path / "client3_wic" / "train.jsonl", records(1))
    write(tmp_path / "client3_wic" / "test.jsonl", records(1))
    with pytest.raises(UserError, match="two folders for the client 'wic'"):
        load(tmp_path, name="flan")
    with pytest.raises(UserError, match="is not a folder; without task.path, flan comes from the Hub"):
        load(tmp_path / "client9_snli/train.jsonl", name="flan")


# Which natural clients take part, and the two sizes of Flan


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
