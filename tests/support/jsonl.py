"""Records as files of one JSON object a line."""

import gzip
import json
from pathlib import Path


def write(path: Path, records: list[dict]) -> Path:
    """Records as one JSON object a line, gzipped where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def records(count: int, **more: object) -> list[dict]:
    return [{"instruction": f"question {i}", "output": f"answer {i}", **more} for i in range(count)]
