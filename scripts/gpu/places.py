"""The task of the step `comparison`: client k is asked for one to ten words of a prompt, from place k + 1 on. Prompts
have 25 to 170 tokens. It is made here, as a bundle has no data and cannot read tables.

    llm-fed compare CONFIG task.name=places:FULL        # with this folder in PYTHONPATH
"""

from __future__ import annotations

import random
from functools import partial

from llm_fed.settings.config import TaskConfig
from llm_fed.tasks import Task
from llm_fed.tasks.common import ClientData, Example, TaskData

WORDS = ("apple", "river", "stone", "cloud", "table", "music", "green", "water", "house", "light", "paper", "garden")


def load(config: TaskConfig, seed: int, *, clients: int, sizes: tuple[int, int, int], longest: int) -> TaskData:
    """Clients with so many examples for training, validation and testing, of at most so many words."""
    draws, made = random.Random(seed), {}
    for k in range(clients):
        name, examples = f"place-{k + 1}", []
        for n in range(sum(sizes)):
            words = draws.choices(WORDS, k=min(longest, 15 + int(draws.lognormvariate(3.8, 0.6))))
            prompt = f"Words: {' '.join(words)}. Say {1 + n % 10} of them, from place {k + 1} on."
            examples.append(Example(prompt, (" ".join(words[k : k + 1 + n % 10]),)))
        ends = sizes[0], sizes[0] + sizes[1]
        made[name] = ClientData(name, examples[: ends[0]], examples[ends[0] : ends[1]], examples[ends[1] :])
    return TaskData("places", "rouge1", made)


def task(clients: int, sizes: tuple[int, int, int], longest: int) -> Task:
    made = partial(load, clients=clients, sizes=sizes, longest=longest)
    return Task(made, "rouge1", f"{clients} clients", "made up here", draws_clients=True)


FULL, TINY = task(8, (270, 30, 100), 140), task(2, (10, 2, 2), 6)
