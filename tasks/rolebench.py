"""The tasks `rolebench` and `rolebench-100`: RoleBench, a role per client, questions answered in the role's own voice.

A row: {"role": "Captain Hull", "question": "Why did you go to sea?", "generated": ["The land was full, my lad.", ...]}

Source: `ZenMoore/RoleBench` on the Hub (Wang et al. 2023, "RoleLLM"), the role-specific parts of
`rolebench-eng/instruction-generalization`, 95 English roles, and for `rolebench-100` of `rolebench-zh`, five Chinese
ones; not yet run against the Hub. With `task.path` a local folder with `train.*` and `test.*` of the same columns is
read instead, all roles of it, without rows of another `kind`.

As in FedMerge (Chen et al. 2026, App. B): a client gets half of its role's training and half of its test questions,
drawn by the seed, as is the order of the roles, so `task.clients=50` is a random sample. Training takes the first of
the answers, as more would let a role count for more in the mean over clients; ROUGE-L takes the best of all. The paper
draws 50 of 100 roles, which is `rolebench-100`. ROUGE takes each Chinese character for a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import derive
from llm_fed.rows import file_rows, hub_rows, layout, rows_at_hand
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks.collected import Collected
from llm_fed.tasks.common import ClientData, Example, TaskData
from llm_fed.tasks.files import listing, local_folder, of_clients

METRIC = "rougeL"
HUB_ID = "ZenMoore/RoleBench"
ENGLISH, CHINESE = "rolebench-eng/instruction-generalization/role_specific", "rolebench-zh/role_specific"
HUB_FOLDERS = {"rolebench": [ENGLISH], "rolebench-100": [ENGLISH, CHINESE]}
COLUMNS = ColumnsConfig(prompt="question", answer="generated", client="role")
KIND = "role_specific"
SHARE = 0.5  # "we randomly select half of the original training dataset and test dataset"


def load(config: TaskConfig, seed: int) -> TaskData:
    if config.path is None:
        folders = HUB_FOLDERS[config.name]
        files = {split: [f"{folder}/{split}.jsonl" for folder in folders] for split in ("train", "test")}
        where, rows = HUB_ID, hub_rows(HUB_ID, data_files=files)
    else:
        path = local_folder(config)
        parts = layout.plan(listing(path), str(path), joined=True).parts
        where = str(path)
        rows = {part.split: [row for name in part.files for row in file_rows(path / name).good()] for part in parts}
        if not {"train", "test"} <= set(rows):
            raise UserError(f"{path} lacks a train or a test file; {config.name} needs both, e.g. train.jsonl.gz")
    collected = Collected(dataclasses.replace(config, columns=COLUMNS), where)
    for split, part in rows.items():
        if own := [row for row in part if row.values.get("kind", KIND) == KIND]:
            collected.add(None, split, [rows_at_hand(f"{where}, {split} split", own)])
    roles = list(collected.clients().values())
    order = np.random.default_rng(derive(seed, "rolebench", "roles")).permutation(len(roles))
    return of_clients(config.name, METRIC, [_half(roles[i], seed) for i in order.tolist()])


def _half(role: ClientData, seed: int) -> ClientData:
    def half(split: str, examples: Sequence[Example]) -> tuple[Example, ...]:
        count = max(0, min(max(round(SHARE * len(examples)), 1), len(examples) - 1))
        rng = np.random.default_rng(derive(seed, f"half of {split}", role.client))
        out = {*rng.choice(len(examples), count, replace=False).tolist()}
        return tuple(example for index, example in enumerate(examples) if index not in out)

    return dataclasses.replace(role, train=half("train", role.train), test=half("test", role.test))
