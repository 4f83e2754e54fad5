"""Files of pairs, made of files of examples."""

import json
from pathlib import Path


def pairs_of(data: Path, folder: Path) -> Path:
    """The federation of `small_run` in another folder, where each answer is preferred to the word w1."""
    for path in sorted(data.rglob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        pairs = [{"prompt": row["instruction"], "chosen": row["output"], "rejected": "w1"} for row in rows]
        copy = folder / path.relative_to(data)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder
