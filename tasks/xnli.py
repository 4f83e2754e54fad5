"""The task `xnli`: XNLI, one language per client; does the first sentence entail the second?

A row of the client `es`: {"premise": "Ana vendió su barco.", "hypothesis": "Ana tiene un barco.", "label": 2}

Labels are 0 entailment, 1 neutral, 2 contradiction, or these words. Prompts end in an English question and are answered
in English. `task.groups=[de,en]` chooses languages.

Source: `facebook/xnli` on the Hub (Conneau et al. 2018), configurations by language; the seed draws 300 of the first
10,000 training rows (translated by machine from English) and 200 test rows, the same in every language, as in
FedMerge's earlier draft (Sec. 4.7: "the content of the client data is identical across languages"); not yet run against
the Hub. With `task.path` a local folder is drawn from instead, `es/{train,test}.jsonl` and so on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.rows import hub_rows
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks.common import ClientData, Example, TaskData
from llm_fed.tasks.examples import to_example
from llm_fed.tasks.files import change, chosen, local_clients, reduce

METRIC = "exact_match"
HUB_ID = "facebook/xnli"
HUB_SPLITS = {"train": "train[:10000]", "test": "test"}
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
LABELS = ("entailment", "neutral", "contradiction")
SIZES = {"train": 300, "test": 200}  # "300 samples for training and 200 samples for evaluation for each client"
COLUMNS: dict[str, Any] = {"prompt": "premise", "input": "hypothesis", "answer": "label"}
QUESTION = (
    "Does the first sentence entail the second (entailment), contradict it (contradiction), or neither (neutral)?"
)


def load(config: TaskConfig, seed: int) -> TaskData:
    if config.path is None:
        clients = [_from_hub(language) for language in chosen(config, LANGUAGES)]
    else:
        clients = local_clients(dataclasses.replace(config, columns=ColumnsConfig(**COLUMNS)), LANGUAGES[0])
    clients = [change(reduce(client, SIZES, seed, "xnli"), _asked) for client in clients]
    return TaskData("xnli", METRIC, {client.client: client for client in clients})


def _from_hub(language: str) -> ClientData:
    rows = {split: hub_rows(HUB_ID, name=language, split=which)["train"] for split, which in HUB_SPLITS.items()}
    return ClientData(
        language, **{split: tuple(to_example(row, COLUMNS, language) for row in part) for split, part in rows.items()}
    )


def _asked(example: Example) -> Example:
    label = example.answers[0]
    names = {**{str(i): name for i, name in enumerate(LABELS)}, **{name: name for name in LABELS}}
    if label not in names:
        raise UserError(f"xnli: the label {label!r} of {example.prompt[:40]!r} is none of {', '.join(names)}")
    prompt = f"{example.prompt}\n\n{QUESTION}"
    return dataclasses.replace(example, prompt=prompt, answers=(names[label],), options=LABELS)
