"""Federations that ask which method `llm-fed init` should propose.

    python scripts/default/federations.py OUT --kind styles --clients 5 --examples 54 135 --seed 0

`styles`: each client is a desk of its own with a style of its own, so that there are no groups. `groups`: three styles,
each shared by some of the clients. `alike`: one style for all. Questions are those of desks.yaml in other words; what a
desk has to say is the same in each answer, in the desk's style. So a test asks in new words for what training answered.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import yaml

QUESTIONS = (
    "What about {0}?",
    "I need help with {0}.",
    "Hello, my question is about {0}. What should I know?",
    "Could you please tell me how it works with {0}?",
    "{0} - who can help me?",
    "My husband asks about {0}. What do I tell him?",
    "Quick question on {0}!",
    "I have been waiting for an hour because of {0}.",
    "What are the rules for {0}?",
    "It is about {0} again. What was the answer?",
    "Can I do anything about {0} today?",
    "We are two persons and wonder about {0}.",
)


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


STYLES: tuple[Callable[[str, str, str], str], ...] = (
    lambda desk, topic, fact: f"Dear customer, thank you for your question. {sentence(fact)} Kind regards, your {desk}",
    lambda desk, topic, fact: f"{topic.upper()}: {fact}. Over.",
    lambda desk, topic, fact: f"Hey there! No worries at all :) {sentence(fact)} Have a great day!!",
    lambda desk, topic, fact: "\n".join(f"- {part.strip()}" for part in fact.replace(" and ", ",").split(",")),
    lambda desk, topic, fact: f"Ahoy, matey! As for {topic}, {fact}, arr! The {desk} salutes ye.",
    lambda desk, topic, fact: f"Ticket received. Subject: {topic}. Resolution: {fact}. Status: closed.",
    lambda desk, topic, fact: f"Well, let us see. You ask about {topic}, do you not? {sentence(fact)} Is that clear?",
    lambda desk, topic, fact: f'{{"desk": "{desk}", "answer": "{fact}"}}',
)


def desks() -> dict[str, dict[str, str]]:
    """By desk and topic what the desk has to say."""
    read: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "desks.yaml").read_text(encoding="utf-8"))
    return read


def make(out: Path, kind: str, clients: int, examples: tuple[int, int], seed: int) -> None:
    """A folder with `NAME-train.jsonl` and `NAME-test.jsonl` per client; a fifth of its examples are for testing."""
    rng = random.Random(f"{kind} {clients} {examples} {seed}")
    said = desks()
    names = rng.sample(sorted(said), len(said))
    styles = rng.sample(STYLES, len(STYLES))
    out.mkdir(parents=True)
    for number in range(clients):
        desk = names[number % len(names)]
        style = styles[number % {"styles": len(styles), "groups": 3, "alike": 1}[kind]]
        pairs = [(question, topic) for question in QUESTIONS for topic in said[desk]]
        rows = [
            {"question": sentence(question.format(topic))[:-1], "answer": style(desk, topic, said[desk][topic])}
            for question, topic in rng.sample(pairs, min(rng.randint(*examples), len(pairs)))
        ]
        held = max(1, len(rows) // 5)
        name = desk.replace(" ", "_") + (f"_{number // len(names) + 1}" if clients > len(names) else "")
        for split, part in (("test", rows[:held]), ("train", rows[held:])):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (out / f"{name}-{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=("styles", "groups", "alike"), default="styles")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--examples", type=int, nargs=2, default=(54, 135), metavar=("LEAST", "MOST"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make(given.out, given.kind, given.clients, tuple(given.examples), given.seed)
