"""The tasks `xquad` and `xnli`: one language per client, with the same content in each; `task.groups=[de,en]` chooses
languages. Neither is yet run against the Hub.

`xquad`: the answer to a question is a span of the text before it. A row of the client `de`:
{"context": "Der Turm in Au ist 40 m hoch.", "question": "Wie hoch ist der Turm?", "answer": "40 m"}

Source: `google/xquad` on the Hub (Artetxe et al. 2020), configurations `xquad.<language>`: 240 texts with 1,190
questions in each of 12 languages. There is a validation split only, so the seed shares out texts with all their
questions, in every language alike: up to 600 questions to train on, the rest to be tested on (FedMerge's earlier draft,
Sec. 4.7). Texts of one article may part. With `task.path` a local folder is read instead, `de/{train,test}.jsonl.gz`
and so on, of whose training questions 600 are drawn, in every language at the same indices. See scoring.metrics for
what F1 and exact match mean outside English.

`xnli`: does the first sentence entail the second? A row of the client `es`:
{"premise": "Ana vendió su barco.", "hypothesis": "Ana tiene un barco.", "label": 2}

Labels are 0 entailment, 1 neutral, 2 contradiction, or these words. Prompts end in an English question and are answered
in English. Source: `facebook/xnli` on the Hub (Conneau et al. 2018), configurations by language; the seed draws 300 of
the first 10,000 training rows (translated by machine from English) and 200 test rows, the same in every language, as in
FedMerge's earlier draft ("the content of the client data is identical across languages"). With `task.path` a local
folder is drawn from instead.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import derive
from llm_fed.rows import Row, hub_rows
from llm_fed.rows.cells import held, text_of
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks.common import ClientData, Example, TaskData
from llm_fed.tasks.files import change, clients_of, of_clients, of_rows, reduce

XQUAD, XQUAD_METRIC = "google/xquad", "squad_f1"
XQUAD_LANGUAGES = ("ar", "de", "el", "en", "es", "hi", "ro", "ru", "th", "tr", "vi", "zh")
XQUAD_COLUMNS = ColumnsConfig(prompt="context", input="question", answer="answer")
TRAIN = 600  # "randomly select 600 samples for training, and use the remaining samples for evaluation"

XNLI, XNLI_METRIC = "facebook/xnli", "exact_match"
XNLI_LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
XNLI_COLUMNS = ColumnsConfig(prompt="premise", input="hypothesis", answer="label")
SIZES = {"train": 300, "test": 200}  # "300 samples for training and 200 samples for evaluation for each client"
LABELS = ("entailment", "neutral", "contradiction")
QUESTION = (
    "Does the first sentence entail the second (entailment), contradict it (contradiction), or neither (neutral)?"
)


def load_xquad(config: TaskConfig, seed: int) -> TaskData:
    def from_hub(language: str) -> ClientData:
        texts: dict[str, list[Row]] = {}
        for row in hub_rows(XQUAD, name=f"xquad.{language}")["validation"]:
            flat = Row(row.where, row.values | {"answer": held(row, "answers.text")})
            texts.setdefault(text_of(flat, "context"), []).append(flat)
        parts: dict[str, list[Row]] = {"train": [], "test": []}
        questions = list(texts.values())
        for index in np.random.default_rng(derive(seed, "xquad", "texts")).permutation(len(questions)).tolist():
            fits = len(parts["train"]) + len(questions[index]) <= TRAIN
            parts["train" if fits else "test"] += questions[index]
        return of_rows(config, language, parts, XQUAD, XQUAD_COLUMNS)

    clients = clients_of(config, XQUAD_LANGUAGES, from_hub, XQUAD_COLUMNS)
    if config.path is not None:
        clients = [reduce(client, {"train": TRAIN}, seed, "xquad") for client in clients]
    return of_clients("xquad", XQUAD_METRIC, clients)


def load_xnli(config: TaskConfig, seed: int) -> TaskData:
    def from_hub(language: str) -> ClientData:
        splits = {"train": "train[:10000]", "test": "test"}
        rows = {split: hub_rows(XNLI, name=language, split=which)["train"] for split, which in splits.items()}
        return of_rows(config, language, rows, XNLI, XNLI_COLUMNS)

    clients = clients_of(config, XNLI_LANGUAGES, from_hub, XNLI_COLUMNS)
    return of_clients("xnli", XNLI_METRIC, [change(reduce(each, SIZES, seed, "xnli"), _asked) for each in clients])


def _asked(example: Example) -> Example:
    label = example.answers[0]
    names = {**{str(i): name for i, name in enumerate(LABELS)}, **{name: name for name in LABELS}}
    if label not in names:
        raise UserError(f"xnli: the label {label!r} of {example.prompt[:40]!r} is none of {', '.join(names)}")
    prompt = f"{example.prompt}\n\n{QUESTION}"
    return dataclasses.replace(example, prompt=prompt, answers=(names[label],), options=LABELS)
