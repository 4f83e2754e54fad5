"""Tasks by name, from the Hub and from folders laid out like its own: XQuAD, XNLI and GLUE."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict
from jsonl import write

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.scoring.scores import score
from llm_fed.settings.config import PartitionConfig, TaskConfig
from llm_fed.tasks import glue, languages
from llm_fed.tasks.common import Example


def numbers(client, split: str) -> list[str]:
    """The part of each prompt that is the same in all languages: what comes after "number"."""
    return [example.prompt.split("number ")[1].split()[0] for example in getattr(client, split)]


# XQuAD


@pytest.fixture
def hub_xquad(monkeypatch):
    """240 texts with 4 or 6 questions each, 1,200 in all, in every language."""
    asked = []

    def load_dataset(path, name):
        asked.append((path, name))
        language = name.removeprefix("xquad.")
        texts = [i for i in range(240) for _ in range(4 + 2 * (i % 2))]
        made = [
            {"context": f"{language} text number {i} .", "question": f"{q}?", "answers": {"text": ["a", "b"],
             "answer_start": [0, 1]}}
            for q, i in enumerate(texts)
        ]  # fmt: skip
        return DatasetDict(validation=Dataset.from_list(made))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def test_xquad_from_the_hub_is_split_by_text(hub_xquad):
    data = tasks.load(TaskConfig(name="xquad", groups=("zh", "en"), validation=0.0), 0)
    assert hub_xquad == [("google/xquad", "xquad.zh"), ("google/xquad", "xquad.en")]
    assert (data.metric, list(data.clients)) == ("squad_f1", ["zh", "en"])
    zh, en = data.clients.values()
    assert 595 <= len(zh.train) <= 600 and len(zh.train) + len(zh.test) == 1200
    assert not set(numbers(zh, "train")) & set(numbers(zh, "test"))  # no text is in both
    assert numbers(zh, "train") == numbers(en, "train") and numbers(zh, "test") == numbers(en, "test")
    prompt = zh.train[0].prompt
    assert prompt.startswith("zh text number ") and " .\n\n" in prompt and prompt.endswith("?")
    assert zh.train[0].answers == ("a", "b")
    other = tasks.load(TaskConfig(name="xquad", groups=("zh",), validation=0.0), 1).clients["zh"]
    assert set(numbers(other, "test")) != set(numbers(zh, "test"))


def test_xquad_of_all_languages(hub_xquad):
    assert tuple(tasks.load(TaskConfig(name="xquad"), 0).clients) == languages.XQUAD_LANGUAGES
    with pytest.raises(UserError, match="task.groups='eng' is unknown .the closest is 'en'"):
        tasks.load(TaskConfig(name="xquad", groups=("eng",)), 0)


def test_xquad_from_a_folder(tmp_path):
    for language in ("de", "ro", "tr"):
        for split, count in {"train": 700, "test": 20}.items():
            made = [
                {"context": f"{language} number {split}{i} .", "question": "Wer?", "answer": "Ada", "answer_start": 0}
                for i in range(count)
            ]
            write(tmp_path / language / f"{split}.jsonl.gz", made)
    (tmp_path / "tr" / "test.jsonl.gz").unlink()  # nobody asks for tr
    data = tasks.load(TaskConfig(name="xquad", path=str(tmp_path), groups=("ro", "de"), validation=0.0), 0)
    assert list(data.clients) == ["ro", "de"]
    ro, de = data.clients.values()
    assert (len(set(numbers(ro, "train"))), len(ro.test)) == (600, 20)
    assert numbers(ro, "train") == numbers(de, "train")
    assert de.test[0] == Example("de number test0 .\n\nWer?", ("Ada",), (), "de")


# XNLI


def sentences(language: str, split: str, count: int, labels: tuple = (0, 1, 2)) -> list[dict]:
    return [
        {"premise": f"{language} number {split}{i} .", "hypothesis": "Nobody.", "label": labels[i % len(labels)]}
        for i in range(count)
    ]


def test_xnli_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(_, name, split):
        asked.append((name, split))
        return Dataset.from_list(sentences(name, split.partition("[")[0], 320))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    data = tasks.load(TaskConfig(name="xnli", validation=0.0), 0)
    assert (data.metric, tuple(data.clients)) == ("exact_match", languages.XNLI_LANGUAGES)
    assert asked[:2] == [("ar", "train[:10000]"), ("ar", "test")]
    ar, zh = data.clients["ar"], data.clients["zh"]
    assert (len(set(numbers(ar, "train"))), len(set(numbers(ar, "test")))) == (300, 200)
    assert numbers(ar, "train") == numbers(zh, "train") and numbers(ar, "test") == numbers(zh, "test")


def test_xnli_from_a_folder_with_labels_as_numbers_or_words(tmp_path, caplog):
    write(tmp_path / "es" / "train.jsonl", sentences("es", "train", 3))
    write(tmp_path / "es" / "test.jsonl", sentences("es", "test", 3, ("neutral", "entailment", "contradiction")))
    client = tasks.load(TaskConfig(name="xnli", path=str(tmp_path), validation=0.0), 0).clients["es"]
    answers = {numbers(client, split)[i]: getattr(client, split)[i].answers for split in ("train", "test")
               for i in range(3)}  # fmt: skip
    assert answers == {
        "train0": ("entailment",), "train1": ("neutral",), "train2": ("contradiction",),
        "test0": ("neutral",), "test1": ("entailment",), "test2": ("contradiction",),
    }  # fmt: skip
    assert client.test[0].options == languages.LABELS
    assert client.test[0].prompt.endswith(f" .\n\nNobody.\n\n{languages.QUESTION}")
    assert "xnli train: all 3 examples are taken, fewer than the 300 wanted" in caplog.text
    write(tmp_path / "es" / "test.jsonl", sentences("es", "test", 1, (-1,)))
    with pytest.raises(UserError, match="label '-1' of 'es number test0 .* is none of 0, 1, 2, entailment"):
        tasks.load(TaskConfig(name="xnli", path=str(tmp_path)), 0)


# SQuAD's metrics


@pytest.mark.parametrize(
    ("prediction", "references", "f1", "em"),
    [
        ("The Norman people!", ("norman people",), 100, 100),  # case, article, punctuation
        ("the big old castle", ("old castle walls",), 200 / 3, 0),  # 2 of 3 and 2 of 3 words
        ("castle castle", ("castle",), 200 / 3, 0),  # a word counts as often as it stands there: 1 of 2 and 1 of 1
        ("castle", ("walls", "old castle", "gate"), 200 / 3, 0),  # the best reference
        ("gate", ("walls", "The gate."), 100, 100),
        ("", ("gate",), 0, 0),
        ("1,000", ("1000",), 100, 100),
        ("der Turm", ("Turm",), 200 / 3, 0),  # German articles are words
        ("北京市", ("北京",), 0, 0),  # one word each
        ("北京", ("北京",), 100, 100),
    ],
)
def test_squad_by_hand(prediction, references, f1, em):
    found = {name: score(name, [prediction], [references]) for name in ("squad_f1", "squad_em")}
    assert found == {"squad_f1": pytest.approx(f1), "squad_em": em}


# GLUE


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
