r"""The tasks `flan` and `flan-2000`: eight Flan tasks, one per client, in two published sizes.

`flan`: 300 training and 200 test examples each (FedDPA; FedMerge). `flan-2000`: 2,000 and 300 of eight other tasks
(POTARA, Table 7), or all where Flan has fewer. `task.groups=[rte,sst2]` chooses other Flan tasks.

A row of the client `cola`: {"targets": "acceptable", "task": "cola", "inputs": "Is the following sentence
linguistically acceptable?\nDoes Joe sing?\nOPTIONS:\n- unacceptable\n- acceptable"}

Source: `Muennighoff/flan` on the Hub (Wei et al. 2022, "Finetuned Language Models Are Zero-Shot Learners"), files
`<split>/<task>_10templates_<split>.jsonl`, of which the seed draws rows; not yet run against the Hub. With `task.path`
the clients come from a local folder like FedDPA's draw instead, `client0_definite_pronoun_resolution/{train,test}...`
and so on; they keep the order of N, and what follows `clientN_` is the client's id.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial

from llm_fed.rows import hub_rows
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import ClientData, Example, TaskData
from llm_fed.tasks.files import change, clients_of, draw, of_clients, of_rows

METRIC = "rouge1"
HUB_ID = "Muennighoff/flan"
TASKS = ("definite_pronoun_resolution", "snli", "cola", "glue_qqp", "trec", "web_nlg_en", "fix_punct", "wic")
TASKS_2000 = ("arc_challenge", "cosmos_qa", "definite_pronoun_resolution", "glue_qqp", "hellaswag", "mnli_matched",
              "squad_v1", "sst2")  # fmt: skip
DRAWS = {  # task.name -> its Flan tasks, and how many rows of each
    "flan": (TASKS, {"train": 300, "test": 200}),
    "flan-2000": (TASKS_2000, {"train": 2000, "test": 300}),
}


def load(config: TaskConfig, seed: int) -> TaskData:
    known = config.groups or DRAWS[config.name][0]  # any task of Flan can be chosen
    from_hub = partial(_from_hub, config=config, seed=seed)
    clients = clients_of(config, known, from_hub, rename=lambda folder: re.sub(r"^client\d+_", "", folder))

    def with_options(example: Example) -> Example:
        return dataclasses.replace(example, options=options_of(example.prompt))

    return of_clients(config.name, METRIC, [change(client, with_options) for client in clients])


def _from_hub(task: str, config: TaskConfig, seed: int) -> ClientData:
    sizes = DRAWS[config.name][1]
    rows = hub_rows(HUB_ID, data_files={split: f"{split}/{task}_10templates_{split}.jsonl" for split in sizes})
    drawn = {split: draw(rows[split], count, seed, "flan", task, split) for split, count in sizes.items()}
    return of_rows(config, task, drawn, HUB_ID)


def options_of(prompt: str) -> tuple[str, ...]:
    """The answers that a Flan prompt lists at its end, after `OPTIONS:`, each on a line `- ...`; else ()."""
    listed = re.search(r"\nOPTIONS:((?:\n- [^\n]*)+)\s*$", prompt)
    return tuple(listed.group(1).split("\n- ")[1:]) if listed else ()
