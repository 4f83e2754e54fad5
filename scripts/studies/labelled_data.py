"""Two data sets with labels, made of Flan's prompts: kinds of questions (TREC), and pairs of questions (QQP).

python scripts/studies/labelled_data.py FLAN OUT

FLAN is the folder of the task `flan`, or one above it, with `client4_trec` and `client3_glue_qqp`. The templates are
taken off; a row whose question cannot be told is left out and counted. OUT/trec and OUT/qqp then hold `train.jsonl` and
`test.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_fed.rows import read_rows

# What a template writes before a question of TREC, which ends with a space and its mark, and has no quotes of its own.
QUESTION = re.compile(r"(?:Here is a question: |Q: |[^\"\n]*\")?(.*? [?.])(?=\"|\s|$)")
ABOUT_PAIRS = re.compile(
    r"(?:are|do|would|could|is|have|please|here|first|question)\b.*\b(?:questions?|same|paraphrase|meaning|two)\b",
    re.IGNORECASE,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flan", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    for name, folder, make in (("trec", "client4_trec", of_trec), ("qqp", "client3_glue_qqp", of_qqp)):
        for split in ("train", "test"):
            paths = sorted(given.flan.rglob(f"{folder}/{split}.json*"))
            if len(paths) != 1:
                sys.exit(
                    f"{given.flan} has {len(paths)} files {folder}/{split}.json*; name the folder of the task flan"
                )
            (path,) = paths
            write(given.out / name / f"{split}.jsonl", [row.values for row in read_rows(path)], make)


def write(path: Path, rows: list[dict[str, Any]], make: Callable[[dict[str, Any]], dict[str, str] | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [one for row in rows if (one := make(row))]
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in made))
    print(f"{path}: {len(made)} of {len(rows)} rows")


def of_trec(row: dict[str, Any]) -> dict[str, str] | None:
    """{"text": "How many people have died of tuberculosis ?", "label": "numeric"}"""
    found = QUESTION.match(row["instruction"].partition("\n\nOPTIONS:")[0])
    return {"text": found[1], "label": row["output"]} if found else None


def of_qqp(row: dict[str, Any]) -> dict[str, str] | None:
    """{"question1": "Why is water polar?", "question2": "Why is water considered polar?", "label": "yes"}"""
    asked = row["instruction"].partition("OPTIONS:")[0]
    lines = [
        re.sub(r"^(?:Question|Q)?\s*\d?\s*[:.)]\s*", "", line).strip() for line in asked.split("\n") if line.strip()
    ]
    texts = [line for line in lines if not ABOUT_PAIRS.match(line)]
    if len(texts) != 2:
        return None
    return {"question1": texts[0], "question2": texts[1], "label": row["output"]}


if __name__ == "__main__":
    main()
