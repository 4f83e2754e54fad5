"""Federations of real rows that ask when sharing pays (docs/results/real_rows.md, and two pages of the log).

    export LLM_FED_DATA=DATA   # a folder with DATA/flan/dataset1/client4_trec/train.jsonl.gz and so on, see below
    python scripts/default/real_rows.py tasks OUT --rows 32 --seed 0
    python scripts/default/real_rows.py labels OUT --rows 16 --seed 0
    python scripts/default/real_rows.py facts OUT --seed 0        # needs no data

`tasks`: three tasks at four clients each, or at two where they ask for too many rows; each client has rows of its own.
The 8 rows of a client are the first of its 32. `labels`: TREC at twelve clients, in three groups with label words of
their own, which no prompt tells. `facts`: six desks have all facts in common, each in a style of its own, and each was
asked about a third of them; it is tested on the others.

The data: TREC's questions and their classes, 300 + 200 rows of Flan as FedDPA drew them (flan/dataset1); sentences of
CommonGen and their concepts, and concepts and a sentence of them, both about 150 + 31 rows of T0 (flan/t0_common_gen).
Instructions are taken off the prompts, as they would be most of all tokens. Rows for testing come from other sources
than those for training.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from federations import QUESTIONS, STYLES, desks, sentence

Row = Mapping[str, str]
TASKS = {  # folder, template of T0, and the part of an instruction that is the prompt
    "trec": ("dataset1/client4_trec", None, r'(?:Q: |Here is a question: )?(?:[^"\n]*?"(?=.*"))?(.+?)(?:"[^"]*)?$'),
    "concepts": ("t0_common_gen", "common_gen_sentence_to_concepts", r"We have the sentence: (.+?);?\s*$"),
    "sentences": ("t0_common_gen", "common_gen_Put_together", r"Put the concepts together .*?: (.+?)\.?\s*$"),
}
TESTED = 40  # rows of a client, as far as the task has them
FEW = 36  # rows of a client, up to which each task has enough for four
CLASSES = ("description", "entity", "abbreviation", "human", "numeric", "location")
WORDS = (CLASSES, ("red", "blue", "green", "black", "white", "brown"), ("cat", "dog", "horse", "sheep", "fish", "bird"))


def rows_of(task: str, split: str, rng: random.Random) -> list[Row]:
    """All rows of a task's split, in an order of `rng`."""
    folder, template, prompt = TASKS[task]
    file = Path(os.environ["LLM_FED_DATA"]) / "flan" / folder / f"{split}.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    given = [row for row in map(json.loads, lines) if row.get("template") == template]
    found = [
        (re.match(prompt, row["instruction"], re.MULTILINE), row["output"]) for row in rng.sample(given, len(given))
    ]
    return [{"question": match[1].strip(), "answer": answer} for match, answer in found if match]


def dealt(task: str, rows: int, rng: random.Random) -> list[dict[str, list[Row]]]:
    """The splits of each client of one task; no training row is at two of them."""
    train, test = rows_of(task, "train", rng), rows_of(task, "test", rng)
    clients = 4 if rows <= FEW else 2
    own = len(train) // 4 * (4 // clients)  # from a client's first row to the next one's
    return [
        {"train": train[place * own :][:rows], "test": rng.sample(test, min(TESTED, len(test)))}
        for place in range(clients)
    ]


def tasks(rows: int, rng: random.Random) -> dict[str, dict[str, list[Row]]]:
    return {f"{task}_{n}": splits for task in TASKS for n, splits in enumerate(dealt(task, rows, rng), start=1)}


def labels(rows: int, rng: random.Random) -> dict[str, dict[str, list[Row]]]:
    """Client n is in group n mod 3."""
    train, test = rows_of("trec", "train", rng), rows_of("trec", "test", rng)
    clients: dict[str, dict[str, list[Row]]] = {}
    for number in range(12):
        words = dict(zip(CLASSES, WORDS[number % 3], strict=True))
        own = {"train": train[number * rows :][:rows], "test": rng.sample(test, TESTED)}
        clients[f"client_{number:02}"] = {
            split: [{"question": row["question"], "answer": words[row["answer"]]} for row in part]
            for split, part in own.items()
        }
    return clients


def facts(rng: random.Random, asked: int = 4) -> dict[str, dict[str, list[Row]]]:
    """24 facts of two desks; a client trains on 8 of them, each asked in four ways, and tests on the other 16."""
    desk, other = rng.sample(sorted(desks()), 2)
    known = list((desks()[desk] | desks()[other]).items())
    rng.shuffle(known)
    clients = {}
    for number, style in enumerate(rng.sample(STYLES, 6)):
        own: dict[str, list[Row]] = {"train": [], "test": []}
        for place, (topic, fact) in enumerate(known):
            split = "train" if place % 3 == number % 3 else "test"
            for question in rng.sample(QUESTIONS, asked if split == "train" else 1):
                asking = sentence(question.format(topic))[:-1]
                own[split].append({"question": asking, "answer": style("front desk", topic, fact)})
        clients[f"desk_{number + 1}"] = own
    return clients


def write(out: Path, clients: Mapping[str, Mapping[str, Sequence[Row]]]) -> None:
    out.mkdir(parents=True)
    for name, splits in clients.items():
        for split, rows in splits.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (out / f"{name}-{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("tasks", "labels", "facts"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=32, help="training rows of a client")
    parser.add_argument("--seed", type=int, default=0, help="the draw")
    given = parser.parse_args()
    if given.kind != "facts" and "LLM_FED_DATA" not in os.environ:
        parser.error("LLM_FED_DATA names no folder; set it to the one that has flan/dataset1")
    drawn = random.Random(f"{given.kind} {given.seed}")
    if given.kind == "facts":
        write(given.out, facts(drawn))
    else:
        write(given.out, {"tasks": tasks, "labels": labels}[given.kind](given.rows, drawn))
