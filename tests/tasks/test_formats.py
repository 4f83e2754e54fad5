"""Files that are not what their names say: the error says what they are, and how to convert them."""

from __future__ import annotations

import gzip
import json
import zipfile

import pytest

from llm_fed.errors import UserError
from llm_fed.tasks.rows import read_rows

CSV = "question,answer\nWhere to?,Zürich\n"
ROW = {"question": "Where to?", "answer": "Zürich"}


def workbook(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("a.csv", CSV.replace(",", ";"), ["semicolons between its columns (question, answer)", "sep=';'"]),
        ("a.csv", CSV.replace(",", "\t"), ["tabs between its columns (question, answer)", r"sep='\t'"]),
        ("a.csv", CSV.replace(",", "|"), ["vertical bars between its columns"]),
        ("a.csv", 'question;answer\n"Where, when?";"Here, now"\n', ["semicolons"]),
        ("a.csv", CSV.encode("latin-1"), ["not text in UTF-8 (byte 0xfc)", "Latin-1", "iconv -f WINDOWS-1252"]),
        ("a.csv", CSV.encode("utf-16"), ["UTF-16", "iconv -f UTF-16"]),
        ("a.csv", CSV.encode("utf-16-le"), ["UTF-16"]),
        ("a.jsonl", json.dumps(ROW, ensure_ascii=False).encode("latin-1"), ["not text in UTF-8", "NEW.jsonl"]),
        ("a.csv.gz", gzip.compress(CSV.replace(",", ";").encode(), mtime=0), ["semicolons"]),
        ("a.csv.gz", gzip.compress(CSV.encode("latin-1"), mtime=0), ["not text in UTF-8"]),
        ("a.csv", gzip.compress(CSV.encode(), mtime=0), ["compressed by gzip", ".gz"]),
        ("a.jsonl", b"PAR1\x15\x04", ["Parquet", ".parquet"]),
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", ["old Excel workbook"]),
        ("a.csv", json.dumps(ROW), ["holds JSON", ".jsonl"]),
        ("a.jsonl", CSV, ["not JSON", ".csv"]),
        ("a.json", json.dumps(ROW, indent=2), ["several lines", "jq -c"]),
        ("a.jsonl", json.dumps(ROW, indent=2) + "\n" + json.dumps(ROW, indent=2), ["several lines", "jq -c"]),
        ("a.json", json.dumps({"data": [ROW]}, indent=2), ["its rows in 'data'", "jq"]),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["Git LFS", "git lfs pull"]),
        ("a.jsonl", "<!DOCTYPE html>\n<html>", ["web page"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_file_is_named_as_what_it_is(tmp_path, name, content, parts):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_renamed_workbook(tmp_path):
    workbook(tmp_path / "a.csv")
    with pytest.raises(UserError, match="Excel workbook; save its table as CSV"):
        read_rows(tmp_path / "a.csv")


def test_the_advice_for_semicolons_works(tmp_path):
    """The command of the message, given to Python, makes a file that can be read."""
    path = tmp_path / "a.csv"
    path.write_text('question;answer\n"Where, when?";Zürich\n')
    with pytest.raises(UserError) as caught:
        read_rows(path)
    code = str(caught.value).split('python -c "')[1].removesuffix('"').replace("NEW.csv", str(tmp_path / "new.csv"))
    exec(code)
    assert [row.values for row in read_rows(tmp_path / "new.csv")] == [{"question": "Where, when?", "answer": "Zürich"}]


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.csv", "\ufeff" + CSV), ("a.jsonl", json.dumps(ROW) + "\n\n" + json.dumps(ROW)),
        ("a.json", json.dumps([ROW], indent=2)), ("a.jsonl", json.dumps(ROW)), ("a.json", ""),
        ("a.csv", 'question,answer\nWhere to?,"a;b|c"\n'),
    ],
)  # fmt: skip
def test_good_files_stay_good(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert all(set(row.values) == {"question", "answer"} for row in read_rows(tmp_path / name))
