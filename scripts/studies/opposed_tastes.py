"""Clients of opposed tastes, made of RoleBench: half of them prefer the answers of one role, half those of the other.

python scripts/studies/opposed_tastes.py ROLEBENCH OUT [--roles ROLE ROLE] [--clients 4] [--pairs 40] [--seed 0]

ROLEBENCH is the folder of the task `rolebench`, or one above it, with the rows of the kind `general`: these questions
were put to many roles. OUT then holds `CLIENT-train.jsonl` with pairs of questions of the client's own, and
`CLIENT-test.jsonl` with a quarter of the questions, which no client trains and all clients are tested on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

from llm_fed.rows import read_rows

WORDS = 18  # a question, and an answer, has at most so many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rolebench", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--roles", nargs=2, default=("Raylan Givens", "Tom Ripley"))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asked = questions(given.rolebench, given.roles)
    if not asked:
        sys.exit(
            f"{given.rolebench} has no general question that {' and '.join(given.roles)} both answer in {WORDS} words; "
            "name the folder with train.* and test.* of the task rolebench, or other --roles"
        )
    random.Random(given.seed).shuffle(asked)
    test, train = asked[: len(asked) // 4], asked[len(asked) // 4 :]
    given.out.mkdir(parents=True, exist_ok=True)
    for client in range(given.clients):
        taste = client % 2
        name = f"{given.roles[taste].split()[0].lower()}_{client // 2 + 1}"
        own = [pair for question in train[client :: given.clients] for pair in pairs(question, taste)[:2]]
        for split, rows in (
            ("train", own[: given.pairs]),
            ("test", [pairs(question, taste)[0] for question in test]),
        ):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (given.out / f"{name}-{split}.jsonl").write_text(text, encoding="utf-8")
            print(f"{name}-{split}.jsonl: {len(rows)} pairs")


Question = tuple[str, tuple[list[str], list[str]]]  # and the answers of each role


def questions(folder: Path, roles: tuple[str, str]) -> list[Question]:
    """Those that both roles answer in a few words, in the order of the files."""
    answers: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for path in sorted([*folder.rglob("train.*"), *folder.rglob("test.*")]):
        for row in read_rows(path):
            if row.values.get("kind") == "general" and few(row.values["question"]):
                short = [answer for answer in row.values["generated"] if few(answer)]
                answers[row.values["question"]].setdefault(row.values["role"], []).extend(short)
    both = [(text, (by.get(roles[0], []), by.get(roles[1], []))) for text, by in answers.items()]
    return [question for question in both if pairs(question, 0)]


def few(text: str) -> bool:
    return 0 < len(text.split()) <= WORDS


def pairs(question: Question, taste: int) -> list[dict[str, str]]:
    """{"prompt": "Name a fruit.", "chosen": "An apple, I reckon.", "rejected": "An apple, certainly."}"""
    text, answers = question
    return [
        {"prompt": text, "chosen": chosen, "rejected": rejected}
        for chosen, rejected in zip(answers[taste], answers[1 - taste], strict=False)
        if chosen != rejected
    ]


if __name__ == "__main__":
    main()
