"""Data files that somebody else wrote: whatever they hold, they are read, or refused in one line."""

import json

import every
import fuzz
import pytest

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import TaskConfig

ONCE_FELL = {  # all were tracebacks
    "brackets in an array": ("train.json", "[" * 100_000 + "]" * 100_000, "malformed JSON"),
    "brackets in a line": (
        "train.jsonl",
        '{"output": "x", "instruction": ' + "[" * 100_000 + "\n",
        "line 1: malformed",
    ),
    "5,000 digits": ("train.jsonl", '{"output": "x", "instruction": ' + "9" * 5000 + "}\n", "line 1: malformed"),
    "a client of 5,000 digits": (
        "train.jsonl",
        "".join(json.dumps({"instruction": "q", "output": "x", "client": "9" * 5000}) + "\n" for _ in range(9)),
        "has 5000 bytes, too many",
    ),
}


@pytest.mark.parametrize("what", ONCE_FELL)
def test_what_once_was_a_traceback_is_one_line(tmp_path, what):
    name, text, message = ONCE_FELL[what]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        tasks.load(TaskConfig(name="files", path=str(tmp_path)), 0)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


def test_what_is_neither_a_file_nor_a_folder():
    with pytest.raises(UserError, match="neither a file nor a folder"):
        tasks.load(TaskConfig(name="files", path="/dev/null"), 0)


def test_files_of_any_kind_are_read_or_refused(tmp_path):
    """JSON, JSONL, CSV, Parquet and npz, changed."""
    kind = fuzz.DataFiles(tmp_path)
    every.passes(range(120), lambda number: fuzz.tried(kind, number))


@pytest.mark.slow
def test_many_files_are_read_or_refused(tmp_path):
    kind = fuzz.DataFiles(tmp_path)
    every.passes(range(30), lambda number: fuzz.tried(kind, f"warm {number}"))  # so that all is loaded
    with every.bounded_memory():
        every.passes(range(10_000), lambda number: fuzz.tried(kind, f"many {number}"))
