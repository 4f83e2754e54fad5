"""The task `planted`: twelve zoos in three groups, each group with its own rule for which pen an animal goes to.

A row of the client `zoo-01`: the prompt "Name the pen of the white deer." with the answer "yew".

An animal is a colour and a kind. In groups 0 and 2 its colour decides the pen, in group 1 its kind; each group draws
its own assignment of the 16 values to the 8 pens. Nothing in a prompt tells the group, and the groups contradict each
other about the same prompts, so the best single model is right for about half of a test. A client has 16 examples of
its group's rule and no hint which word matters; on average they show 10 of the 16 values, those of the four clients of
a group together nearly all.

Of the 256 animals 64 are set aside for testing and 16 for validation, for all clients alike. So a test asks for the
group's rule on pairs of words that no client has seen together, while the base model knows the words. A client draws
its training animals from the other 176, uniformly and without replacement. The seed draws the rules, the held-out
animals and the examples.

Source: made up here. The base model in `assets/tiny-base` knows these words and rules of the same kind, see
`scripts/make_tiny_base.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from llm_fed.basics.rng import derive
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import ClientData, Example, TaskData

METRIC = "exact_match"

WORDS = {
    "colour": "red blue green black white brown grey golden pink purple orange yellow silver pale dark spotted",
    "kind": "fox bear crow toad deer mole seal wolf goat hare lynx newt owl pony rat swan",
}
TRAITS = {trait: tuple(words.split()) for trait, words in WORDS.items()}
PENS = ("oak", "elm", "fir", "ash", "yew", "bay", "fig", "ivy")
QUESTIONS = ("Which {thing} is for the {animal}?", "Name the {thing} of the {animal}.")
GROUP_TRAITS = ("colour", "kind", "colour")  # what decides the pen in each group
CLIENTS_PER_GROUP = 4
TRAIN, VALIDATION, TEST = 16, 16, 64  # examples of each client

GROUPS = {f"zoo-{i + 1:02d}": i // CLIENTS_PER_GROUP for i in range(len(GROUP_TRAITS) * CLIENTS_PER_GROUP)}


def group(client: str) -> int:
    """The planted group of a client; for pictures and tests, no method sees it."""
    return GROUPS[client]


def load(config: TaskConfig, seed: int) -> TaskData:
    """All twelve clients; sizes are fixed, so that published figures stay comparable."""
    return planted(GROUPS, GROUP_TRAITS, seed)


def planted(groups: Mapping[str, int], traits: Sequence[str], seed: int) -> TaskData:
    """A federation like the task's, of other clients, with the number of each one's group, and of other groups, with
    the trait that decides the pen in each: `colour` or `kind`."""
    rng = random.Random(derive(seed, "planted"))
    animals = list(itertools.product(*TRAITS.values()))
    rng.shuffle(animals)
    prompts = [rng.choice(QUESTIONS).format(thing="pen", animal=" ".join(animal)) for animal in animals]
    rules = [assignment(TRAITS[trait], PENS, rng) for trait in traits]

    def example(index: int, group: int) -> Example:
        value = animals[index][list(TRAITS).index(traits[group])]
        return Example(prompts[index], (rules[group][value],), options=PENS)

    held_out = TEST + VALIDATION
    clients = {}
    for client, group in groups.items():
        splits = [rng.sample(range(held_out, len(animals)), TRAIN), range(TEST, held_out), range(TEST)]
        clients[client] = ClientData(client, *(tuple(example(i, group) for i in split) for split in splits))
    return TaskData("planted", METRIC, clients)


def assignment(values: tuple[str, ...], codes: tuple[str, ...], rng: random.Random) -> dict[str, str]:
    """A random rule value -> code word in which every code word stands for equally many values."""
    if len(values) % len(codes):
        raise ValueError(f"{len(values)} values cannot be shared out evenly among {len(codes)} code words")
    shared_out = list(codes) * (len(values) // len(codes))
    rng.shuffle(shared_out)
    return dict(zip(values, shared_out, strict=True))
