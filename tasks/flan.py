r"""The task `flan`: eight Flan tasks, one per client, 300 training and 200 test examples each (as in FedDPA).

A row of the client `cola`: {"targets": "acceptable", "task": "cola", "inputs": "Is
the following sentence linguistically acceptable?\nDoes Joe sing?\nOPTIONS:\n- unacceptable\n- acceptable"}

Source: `Muennighoff/flan` on the Hub (Wei et al. 2022, "Finetuned Language Models Are Zero-Shot Learners"),
files `<split>/<task>_10templates_<split>.jsonl`; the seed draws 300 and 200 rows of each task. Not yet run
against the Hub. With `task.path` the clients come from a local folder instead, laid out like FedDPA's draw:
`client0_definite_pronoun_resolution/{train,test}.jsonl.gz` and so on; they keep the order of N, and what
follows `clientN_` is the client's id.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llm_fed.config import TaskConfig
from llm_fed.errors import UserError
from llm_fed.rng import derive
from llm_fed.tasks.common import ClientData, Example, TaskData
from llm_fed.tasks.files import client_folders, group_of, read_client
from llm_fed.tasks.rows import find_columns, hub_rows, to_example

METRIC = "rouge1"
HUB_ID = "Muennighoff/flan"
TASKS = ("definite_pronoun_resolution", "snli", "cola", "glue_qqp", "trec", "web_nlg_en", "fix_punct", "wic")
ROWS = {"train": 300, "test": 200}


def load(config: TaskConfig, seed: int) -> TaskData:
    """One client per task, in FedDPA's order; examples that list their options carry them."""
    if config.path is None:
        clients = [_from_hub(task, config, seed) for task in TASKS]
    else:
        clients = _from_folder(Path(config.path).expanduser(), config)
    return TaskData("flan", METRIC, {client.client: client for client in clients})


def _from_hub(task: str, config: TaskConfig, seed: int) -> ClientData:
    rows = hub_rows(HUB_ID, data_files={split: f"{split}/{task}_10templates_{split}.jsonl" for split in ROWS})
    splits: dict[str, tuple[Example, ...]] = {}
    for split, count in ROWS.items():
        if len(rows[split]) < count:
            raise UserError(f"{HUB_ID} has {len(rows[split])} {split} rows of {task}; flan needs {count}")
        rng = np.random.default_rng(derive(seed, "flan", task, split))
        chosen = rng.choice(len(rows[split]), count, replace=False)
        columns = find_columns(config.columns, rows[split], f"{HUB_ID} ({split} of {task})")
        splits[split] = _with_options(
            to_example(rows[split][i], columns, group_of(rows[split][i], config, task)) for i in chosen.tolist()
        )
    return ClientData(task, **splits)


def _from_folder(path: Path, config: TaskConfig) -> list[ClientData]:
    if not path.is_dir():
        raise UserError(f"task.path={config.path!r} is no folder; without task.path, flan comes from the Hub")
    clients: dict[str, ClientData] = {}
    for folder in client_folders(path):
        name = re.sub(r"^client\d+_", "", folder.name)
        if name in clients:
            raise UserError(f"{path} has two folders for the client {name!r}; keep one")
        data = read_client(folder, name, config)
        parts = (data.train, data.validation, data.test)
        clients[name] = ClientData(name, *(_with_options(part) for part in parts))
    if not clients:
        raise UserError(f"{path} holds no client folder such as client0_{TASKS[0]}")
    return list(clients.values())


def _with_options(examples: Iterable[Example]) -> tuple[Example, ...]:
    return tuple(dataclasses.replace(each, options=options_of(each.prompt)) for each in examples)


def options_of(prompt: str) -> tuple[str, ...]:
    """The answers that a Flan prompt lists at its end, after `OPTIONS:`, each on a line `- ...`; else ()."""
    listed = re.search(r"\nOPTIONS:((?:\n- [^\n]*)+)\s*$", prompt)
    return tuple(listed.group(1).split("\n- ")[1:]) if listed else ()
