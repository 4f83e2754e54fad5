"""The task `xquad`: XQuAD, one language per client; the answer to a question is a span of the text before it.

A row of the client `de`: {"context": "Der Turm in Au ist 40 m hoch.", "question": "Wie hoch ist der Turm?", "answer":
"40 m"}

Source: `google/xquad` on the Hub (Artetxe et al. 2020), configurations `xquad.<language>`: 240 texts with 1,190
questions, the same in each of 12 languages (`task.groups=[de,en]` chooses); not yet run against the Hub. There is a
validation split only, so the seed shares out texts with all their questions, in every language alike: up to 600
questions to train on, the rest to be tested on (FedMerge's earlier draft, Sec. 4.7). Texts of one article may part.
With `task.path` a local folder is read instead, `de/{train,test}.jsonl.gz` and so on, of whose training questions 600
are drawn, in every language at the same indices. See scoring.metrics for what F1 and exact match mean outside English.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from llm_fed.basics.rng import derive
from llm_fed.rows import Row, hub_rows
from llm_fed.rows.cells import held, text_of
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.examples import to_example
from llm_fed.tasks.files import chosen, local_clients, reduce

METRIC = "squad_f1"
HUB_ID = "google/xquad"
LANGUAGES = ("ar", "de", "el", "en", "es", "hi", "ro", "ru", "th", "tr", "vi", "zh")
TRAIN = 600  # "randomly select 600 samples for training, and use the remaining samples for evaluation"
COLUMNS: dict[str, Any] = {"prompt": "context", "input": "question", "answer": "answer"}


def load(config: TaskConfig, seed: int) -> TaskData:
    if config.path is None:
        clients = [_from_hub(language, seed) for language in chosen(config, LANGUAGES)]
    else:
        local = local_clients(dataclasses.replace(config, columns=ColumnsConfig(**COLUMNS)), LANGUAGES[0])
        clients = [reduce(client, {"train": TRAIN}, seed, "xquad") for client in local]
    return TaskData("xquad", METRIC, {client.client: client for client in clients})


def _from_hub(language: str, seed: int) -> ClientData:
    texts: dict[str, list[Row]] = {}
    for row in hub_rows(HUB_ID, name=f"xquad.{language}")["validation"]:
        flat = Row(row.where, row.values | {"answer": held(row, "answers.text")})
        texts.setdefault(text_of(flat, "context"), []).append(flat)
    parts: dict[str, list[Row]] = {"train": [], "test": []}
    questions = list(texts.values())
    for i in np.random.default_rng(derive(seed, "xquad", "texts")).permutation(len(questions)).tolist():
        fits = len(parts["train"]) + len(questions[i]) <= TRAIN
        parts["train" if fits else "test"] += questions[i]
    splits = {split: tuple(to_example(row, COLUMNS, language) for row in part) for split, part in parts.items()}
    return ClientData(language, **splits)
