"""The names of a classifier's logits, in a file beside its adapter: PEFT's own files have no place for them."""

from __future__ import annotations

import json
from pathlib import Path

from llm_fed.basics import checksum
from llm_fed.basics.documents import load_json
from llm_fed.basics.errors import UserError, one_line
from llm_fed.basics.files import read_file

FILE = "labels.json"


def as_json(labels: tuple[str, ...]) -> bytes:
    """What the file says."""
    return json.dumps(checksum.added({"labels": list(labels)}), indent=2, ensure_ascii=False).encode()


def read_labels(folder: Path) -> tuple[str, ...] | None:
    """The names, by logit; None where the folder has no such file. UserError: the file is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        labels = checksum.checked(load_json(read_file(path)))["labels"]
        if not (isinstance(labels, list) and labels and all(isinstance(label, str) for label in labels)):
            raise ValueError("labels are a list of texts")
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {one_line(str(error))}; export the adapter again") from error
    return tuple(labels)
