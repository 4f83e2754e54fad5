"""A federation as files in which some clients have few examples, or none of a split."""

import json
from collections.abc import Mapping
from pathlib import Path

WHOLE = {"train": 6, "validation": 2, "test": 3}


def write(folder: Path, clients: Mapping[str, Mapping[str, int] | int]) -> Path:
    """A folder per client with so many examples of each split; a number: one file without splits."""
    folder.mkdir(parents=True)
    for place, (client, sizes) in enumerate(clients.items()):
        if isinstance(sizes, int):
            (folder / f"{client}.jsonl").write_text(rows(sizes, place))
            continue
        (folder / client).mkdir()
        for split, size in sizes.items():
            (folder / client / f"{split}.jsonl").write_text(rows(size, place))
    return folder


def rows(size: int, place: int, words: int = 1) -> str:
    """Each client answers in a word of its own; prompts have so many words."""
    questions = (" ".join([f"w{20 + number % 10}"] * words) for number in range(size))
    return "".join(json.dumps({"instruction": text, "output": f"w{4 + place}"}) + "\n" for text in questions)
