"""Federations of real rows: whose a row is, and what a client is tested on."""

import gzip
import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

CLASSES = ("human", "numeric")
FOLDER = Path(__file__).parents[2] / "scripts" / "default"


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("real_rows")


@pytest.fixture
def data(monkeypatch, tmp_path) -> None:
    """As many rows as the data sets have, in a few of their forms."""
    asked = ("What is {} ?", "Q: What is {} ?\n\nWhich one of these?", 'Is the question "What is {} ?" about a thing?')

    def of_common_gen(n: int) -> tuple[str, str, str]:
        if n % 2:
            return f"Put the concepts together to form a sentence: cat {n}, run.", "A cat.", "common_gen_Put_together"
        said = f"We have the sentence: cat {n} runs; \nExtract all the key concepts:"
        return said, "cat, run", "common_gen_sentence_to_concepts"

    rows = {
        "dataset1/client4_trec": (300, 200, lambda n: (asked[n % 3].format(f"word{n}"), CLASSES[n % 2], None)),
        "t0_common_gen": (292, 62, of_common_gen),
    }
    for folder, (train, test, row) in rows.items():
        path = tmp_path / "flan" / folder
        path.mkdir(parents=True)
        for split, numbers in (("train", range(train)), ("test", range(1000, 1000 + test))):
            lines = [json.dumps(dict(zip(("instruction", "output", "template"), row(n), strict=True))) for n in numbers]
            (path / f"{split}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setenv("LLM_FED_DATA", str(tmp_path))


@pytest.mark.parametrize("rows, clients", [(8, 12), (32, 12), (72, 6)])
def test_no_training_row_is_at_two_clients_or_tested(script, data, rows, clients):
    made = script.tasks(rows, random.Random(0))
    train = [row["question"] for own in made.values() for row in own["train"]]
    tested = {row["question"] for own in made.values() for row in own["test"]}
    assert len(made) == clients and len(train) == clients * rows == len({*train})
    assert not tested & {*train}
    assert made["trec_1"]["train"][:8] == script.tasks(8, random.Random(0))["trec_1"]["train"]
    of_trec = [row["question"] for row in made["trec_1"]["train"]]
    assert all(text.startswith("What is word") and text.endswith(" ?") for text in of_trec)  # without the instructions


def test_groups_contradict_each_other(script, data):
    made = script.labels(16, random.Random(0))
    said = [{row["answer"] for row in own["train"]} for own in made.values()]
    assert len(made) == 12 and said[0] <= {*script.CLASSES}
    assert not (said[0] & said[1] or said[1] & said[2] or said[0] & said[2]) and said[3] <= {*script.CLASSES}


def test_tested_facts_are_those_of_others(script):
    made = script.facts(random.Random(0))
    for name, own in made.items():
        trained = {row["answer"] for row in own["train"]}
        assert len(own["train"]) == 32 and len(trained) == 8 and len(own["test"]) == 16
        assert not trained & {row["answer"] for row in own["test"]}, name
