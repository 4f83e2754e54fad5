"""Federations of real rows that ask when sharing pays (docs/results/real_rows.md, contradictions.md, shared_facts.md).

    export LLM_FED_DATA=DATA   # a folder with Flan tasks as FedDPA drew them: DATA/flan/dataset1/client4_trec/train...
    python scripts/default/real_rows.py tasks OUT --rows 32 --seed 0
    python scripts/default/real_rows.py labels OUT --rows 16 --seed 0
    python scripts/default/real_rows.py facts OUT --seed 0        # needs no data

`tasks`: three Flan tasks at four clients each, or at two where a task has too few rows; each client has rows of its
own, and tests on others. The 8 rows of a client are the first of its 32. `labels`: questions of TREC at twelve clients,
in three groups with label words of their own, which no prompt tells. `facts`: six desks have all facts in common, each
in a style of its own, and each was asked about a third of them; it is tested on the others.
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
TASKS = ("trec", "snli", "glue_qqp")
SPACING, TESTED = 75, 50  # training rows from one client's first to the next one's; test rows of a client
CLASSES = ("description", "entity", "abbreviation", "human", "numeric", "location")
WORDS = (CLASSES, ("red", "blue", "green", "black", "white", "brown"), ("cat", "dog", "horse", "sheep", "fish", "bird"))


def flan(task: str, split: str, rng: random.Random) -> list[Row]:
    """All rows of a task's split, in an order of `rng`."""
    folder = Path(os.environ["LLM_FED_DATA"]) / "flan" / "dataset1"
    (file,) = folder.glob(f"client?_{task}/{split}.jsonl.gz")
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    rows = [{"question": row["instruction"], "answer": row["output"]} for row in map(json.loads, lines)]
    return rng.sample(rows, len(rows))


def dealt(task: str, rows: int, rng: random.Random) -> list[dict[str, list[Row]]]:
    """The splits of each client of one task; no row is at two of them."""
    train, test = flan(task, "train", rng), flan(task, "test", rng)
    step = SPACING * -(-rows // SPACING)
    return [
        {"train": train[start : start + rows], "test": test[number * TESTED : (number + 1) * TESTED]}
        for number, start in enumerate(range(0, len(train) - rows + 1, step))
    ]


def tasks(rows: int, rng: random.Random) -> dict[str, dict[str, list[Row]]]:
    return {f"{task}_{n}": splits for task in TASKS for n, splits in enumerate(dealt(task, rows, rng), start=1)}


def labels(rows: int, rng: random.Random) -> dict[str, dict[str, list[Row]]]:
    """Client n is in group n mod 3. Flan's ways to ask for the class are taken off, as they list the words."""
    train, test = flan("trec", "train", rng), flan("trec", "test", rng)
    clients = {}
    for number in range(12):
        words = dict(zip(CLASSES, WORDS[number % 3], strict=True))
        own = {"train": train[number * rows :][:rows], "test": rng.sample(test, TESTED)}
        clients[f"client_{number:02}"] = {
            split: [{"question": question_of(row["question"]), "answer": words[row["answer"]]} for row in part]
            for split, part in own.items()
        }
    return clients


def question_of(prompt: str) -> str:
    first = prompt.split("\n")[0].removeprefix("Q: ").removeprefix("Here is a question: ")
    quoted = re.search('"(.+)"', first)
    return quoted.group(1) if quoted else first


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
