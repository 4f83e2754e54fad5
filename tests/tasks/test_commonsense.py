"""The task `commonsense`: LLM-Adapters' form from a folder and from the Hub's data sets, sizes, and its metric."""

from collections import defaultdict
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from jsonl import write

from llm_fed import tasks
from llm_fed.scoring.scores import score
from llm_fed.settings.config import PartitionConfig, TaskConfig
from llm_fed.tasks import commonsense
from llm_fed.tasks.common import Example

CHOICES = {"text": ["ice", "iron", "salt"], "label": ["A", "B", "C"]}
HUB = {  # one row of each data set, and what it becomes
    "ARC-Challenge": (
        {"question": "What melts first?", "choices": {**CHOICES, "label": ["1", "2", "3"]}, "answerKey": "3"},
        "Please choose the correct answer to the question: What melts first?\n\nAnswer1: ice Answer2: iron "
        "Answer3: salt\n\nAnswer format: answer1/answer2/answer3",
        "answer3",
    ),
    "ARC-Easy": (
        {"question": "What melts first?", "choices": CHOICES, "answerKey": "A"},
        "Please choose the correct answer to the question: What melts first?\n\nAnswer1: ice Answer2: iron "
        "Answer3: salt\n\nAnswer format: answer1/answer2/answer3",
        "answer1",
    ),
    "boolq": (
        {"question": "is ice a mineral", "answer": False, "passage": "Ice is ..."},
        "Please answer the following question with true or false, question: is ice a mineral?\n\n"
        "Answer format: true/false",
        "false",
    ),
    "hellaswag": (
        {"activity_label": "Skating", "ctx": "She laces up. She", "endings": ["falls.", "sings."], "label": "1"},
        "Please choose the correct ending to complete the given sentence: Skating: She laces up. She\n\n"
        "Ending1: falls. Ending2: sings.\n\nAnswer format: ending1/ending2",
        "ending2",
    ),
    "openbookqa": (
        {"question_stem": "Water is", "choices": CHOICES, "answerKey": "B"},
        "Please choose the correct answer to the question: Water is\n\nAnswer1: ice Answer2: iron "
        "Answer3: salt\n\nAnswer format: answer1/answer2/answer3",
        "answer2",
    ),
    "piqa": (
        {"goal": "Cool tea", "sol1": "Blow.", "sol2": "Boil.", "label": 0},
        "Please choose the correct solution to the question: Cool tea\n\nSolution1: Blow.\n\nSolution2: Boil.\n\n"
        "Answer format: solution1/solution2",
        "solution1",
    ),
    "social_i_qa": (
        {"context": "Al fell.", "question": "Why?", "answerA": "ice", "answerB": "sun", "answerC": "fun", "label": "1"},
        "Please choose the correct answer to the question: Al fell. Why?\n\nAnswer1: ice Answer2: sun Answer3: fun\n\n"
        "Answer format: answer1/answer2/answer3",
        "answer1",
    ),
    "winogrande": (
        {"sentence": "The cup broke the _ .", "option1": "cup", "option2": "plate", "answer": "2"},
        "Please choose the correct answer to fill in the blank to complete the given sentence: The cup broke the _ ."
        "\n\nOption1: cup Option2: plate Answer format: option1/option2",
        "option2",
    ),
}


@pytest.fixture
def hub(monkeypatch):
    """The Hub's data sets with a few copies of one row each; what was asked for, by data set."""
    asked = defaultdict(list)

    def load_dataset(name, revision, data_files):
        asked[name].append((revision, data_files))
        folder = data_files["train"].partition("/")[0]
        key = next(k for k, s in commonsense.SOURCES.items() if (s.hub_id, s.folder) == (name, folder))
        sizes = {"train": 4, "test": 2}
        return DatasetDict({s: Dataset.from_list([HUB[key][0]] * sizes[s]) for s in data_files})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def test_each_hub_data_set_becomes_llm_adapters_form(hub):
    data = tasks.load(TaskConfig(name="commonsense"), 0)
    assert (data.metric, list(data.clients)) == ("commonsense_accuracy", list(HUB))
    for name, (_, prompt, answer) in HUB.items():
        options = tuple(f"the correct answer is {each}" for each in prompt.rpartition("Answer format: ")[2].split("/"))
        expected = Example(prompt, (f"the correct answer is {answer}",), options, name)
        client = data.clients[name]
        assert set(client.train + client.validation + client.test) == {expected}
        assert (len(client.train + client.validation), len(client.test)) == (4, 2)
    assert hub["ybisk/piqa"] == [
        ("refs/convert/parquet", {"train": "plain_text/train/*.parquet", "test": "plain_text/validation/*.parquet"})
    ]


def folder(path: Path, train: int, test: int) -> Path:
    for split, count in {"train": train, "test": test}.items():
        prompt = "Please choose the correct solution to the question: {}\n\nAnswer format: solution1/solution2"
        made = [
            {"instruction": prompt.format(f"{split} {i}"), "input": "", "output": "the correct answer is solution2",
             "answer": "solution2"}
            for i in range(count)
        ]  # fmt: skip
        write(path / "piqa" / f"{split}.jsonl.gz", made)
    return path


def test_a_folder_is_drawn_down_to_the_papers_sizes(tmp_path, caplog):
    path = str(folder(tmp_path, 2600, 600))
    one = tasks.load(TaskConfig(name="commonsense", path=path, validation=0.0), 0).clients["piqa"]
    assert (len(set(one.train)), len(set(one.test))) == (1000, 500)
    assert one.test[0].answers[0] == one.test[0].options[1] == "the correct answer is solution2"
    other = tasks.load(TaskConfig(name="commonsense", path=path, validation=0.0), 1).clients["piqa"]
    assert set(other.train) != set(one.train)

    split = PartitionConfig(kind="split", clients=2)
    two = tasks.load(TaskConfig(name="commonsense", path=path, validation=0.0, partition=split), 0).clients
    assert {name: (len(c.train), len(c.test)) for name, c in two.items()} == {
        "piqa-0": (1000, 250), "piqa-1": (1000, 250),
    }  # fmt: skip
    assert not set(two["piqa-0"].train) & set(two["piqa-1"].train)
    assert not caplog.text


def test_too_few_examples_are_all_taken_with_a_warning(tmp_path, caplog):
    data = tasks.load(TaskConfig(name="commonsense", path=str(folder(tmp_path, 5, 500)), validation=0.0), 0)
    assert len(data.clients["piqa"].train) == 5
    assert "commonsense piqa train: all 5 examples are taken, fewer than the 1000 wanted" in caplog.text


@pytest.mark.parametrize(
    ("prediction", "reference", "right"),
    [
        ("the correct answer is answer2", "the correct answer is answer2", True),
        ("answer1. No: answer2", "the correct answer is answer2", False),  # the first one counts
        ("I would say solution2, answer2", "the correct answer is answer2", True),  # other data sets' answers do not
        ("it's true that answer3", "the correct answer is false", False),
        ("untrue", "the correct answer is true", True),  # no word borders, as in LLM-Adapters
        ("Answer2", "the correct answer is answer2", False),  # nor upper case
        ("solution3 solution1", "the correct answer is solution1", True),  # there is no solution3
        ("answer 2", "the correct answer is answer2", False),
        ("", "the correct answer is option1", False),
        ("ending4", "ending4", True),
    ],
)
def test_extracted_accuracy(prediction, reference, right):
    found = score("commonsense_accuracy", [prediction, "option1"], [(reference,), ("the correct answer is option1",)])
    assert found == 50 + 50 * right
