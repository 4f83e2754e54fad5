r"""The task `commonsense`: eight multiple-choice data sets in the form of LLM-Adapters, one per client.

A row of the client `openbookqa`: {"instruction": "Please choose the correct answer to the question: What melts
first?\n\nAnswer1: ice Answer2: iron Answer3: salt Answer4: sand\n\nAnswer format: answer1/answer2/answer3/answer4",
"input": "", "output": "the correct answer is answer1", "answer": "answer1"}

Source: the data sets' own repositories on the Hub, put into that form (Hu et al. 2023, "LLM-Adapters"), with its tests,
or the validation split where test labels are secret; not yet run against the Hub. Its one training file
(`zwhe99/commonsense_170k`) does not tell ARC and OpenBookQA apart. With `task.path` the clients come from a local
folder in that form instead, `openbookqa/{train,test}.jsonl.gz` and so on.

The seed draws 1,000 training and 500 test examples of each (POTARA, Sec. 4.2). With `task.partition.kind=split` and
`clients: 2` it draws 2,000, so that each of 16 clients has its own 1,000 (App. D); ARC-Challenge has 1,119 in all.
Deviation: `split` also divides the 500 test examples, where the paper's two clients of a task seem to share them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.rows import Row, hub_rows
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import ClientData, Example, TaskData
from llm_fed.tasks.files import change, clients_of, of_clients, reduce

METRIC = "commonsense_accuracy"
TRAIN, TEST = 1000, 500
ANSWER = "the correct answer is {}"

CHOOSE = "Please choose the correct {} {}: "
FORMS = {  # what an option is called -> the question before it, what stands between options, what follows them
    "answer": (CHOOSE.format("answer", "to the question"), " ", "\n\n"),
    "solution": (CHOOSE.format("solution", "to the question"), "\n\n", "\n\n"),
    "ending": (CHOOSE.format("ending", "to complete the given sentence"), " ", "\n\n"),
    "option": (CHOOSE.format("answer", "to fill in the blank to complete the given sentence"), " ", " "),
}

Values = dict[str, Any]  # one row of a Hub data set
Choice = tuple[str, list[str], int]  # question, options, index of the right one


@dataclass(frozen=True)
class ParquetDataset:
    """A data set in the Hub's Parquet branch, `<folder>/<split>/*.parquet`."""

    hub_id: str
    folder: str
    test: str  # the split that is tested on
    form: str  # a key of FORMS, or true/false
    read: Callable[[Values], Choice]


def _labelled(question: str) -> Callable[[Values], Choice]:
    return lambda row: (row[question], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"]))


SOURCES = {
    "ARC-Challenge": ParquetDataset("allenai/ai2_arc", "ARC-Challenge", "test", "answer", _labelled("question")),
    "ARC-Easy": ParquetDataset("allenai/ai2_arc", "ARC-Easy", "test", "answer", _labelled("question")),
    "boolq": ParquetDataset("google/boolq", "default", "validation", "true/false",
                    lambda row: (f"{row['question']}?", [], int(not row["answer"]))),
    "hellaswag": ParquetDataset("Rowan/hellaswag", "default", "validation", "ending",
                        lambda row: (f"{row['activity_label']}: {row['ctx']}", row["endings"], int(row["label"]))),
    "openbookqa": ParquetDataset("allenai/openbookqa", "main", "test", "answer", _labelled("question_stem")),
    "piqa": ParquetDataset("ybisk/piqa", "plain_text", "validation", "solution",
                   lambda row: (row["goal"], [row["sol1"], row["sol2"]], int(row["label"]))),
    "social_i_qa": ParquetDataset("allenai/social_i_qa", "default", "validation", "answer",
                          lambda row: (f"{row['context']} {row['question']}",
                                       [row["answerA"], row["answerB"], row["answerC"]], int(row["label"]) - 1)),
    "winogrande": ParquetDataset("allenai/winogrande", "winogrande_xl", "validation", "option",
                         lambda row: (row["sentence"], [row["option1"], row["option2"]], int(row["answer"]) - 1)),
}  # fmt: skip


def load(config: TaskConfig, seed: int) -> TaskData:
    """One client per data set; every example lists its options, so that they can be scored, too."""
    clients = [change(client, _with_options) for client in clients_of(config, tuple(SOURCES), _from_hub)]
    share = config.partition.clients or 1 if config.partition.kind == "split" else 1
    sizes = {"train": TRAIN * max(1, share), "test": TEST}
    drawn = [reduce(client, sizes, seed, "commonsense", client.client) for client in clients]
    return of_clients("commonsense", METRIC, drawn)


def _from_hub(name: str) -> ClientData:
    source = SOURCES[name]
    files = {"train": f"{source.folder}/train/*.parquet", "test": f"{source.folder}/{source.test}/*.parquet"}
    rows = hub_rows(source.hub_id, revision="refs/convert/parquet", data_files=files)
    return ClientData(name, **{split: tuple(_from_row(row, source, name) for row in rows[split]) for split in files})


def _from_row(row: Row, source: ParquetDataset, name: str) -> Example:
    try:
        question, texts, right = source.read(row.values)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{row.where} is not what {source.hub_id} held when this was written: {error!r}") from error
    return example(source.form, question, texts, right, name)


def example(form: str, question: str, texts: list[str], right: int, group: str) -> Example:
    """A question with its options in the form of LLM-Adapters; `form` is a key of FORMS, or true/false."""
    if form == "true/false":
        names = ["true", "false"]
        text = f"Please answer the following question with true or false, question: {question}\n\n"
    else:
        ask, between, after = FORMS[form]
        names = [f"{form}{i}" for i in range(1, len(texts) + 1)]
        listed = (f"{name.capitalize()}: {text}" for name, text in zip(names, texts, strict=True))
        text = f"{ask}{question}\n\n{between.join(listed)}{after}"
    prompt = f"{text}Answer format: {'/'.join(names)}"
    return Example(prompt, (ANSWER.format(names[right]),), group=group)


def _with_options(example: Example) -> Example:
    listed = re.search(r"Answer format: (\w+(?:/\w+)+)\s*$", example.prompt)
    options = tuple(map(ANSWER.format, listed.group(1).split("/"))) if listed else ()
    return dataclasses.replace(example, options=options)
