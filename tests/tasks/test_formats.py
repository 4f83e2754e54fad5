"""Files of every form, encoding and compression: what is in them is read, whatever their names say, and how it was read
is said where it had to be found out. What cannot be read is named as what it is."""

import bz2
import gzip
import io
import json
import lzma
import tomllib
from datetime import date, datetime
from pathlib import Path

import any_form
import pandas
import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pytest

from llm_fed.basics.errors import UserError
from llm_fed.rows import BadRow, file_rows, formats, readers
from llm_fed.rows.encodings import NAMES

CSV = "question,answer\nWhere to?,Zürich\n"
ROW = {"question": "Where to?", "answer": "Zürich"}
JSONL = json.dumps(ROW, ensure_ascii=False) + "\n"


def parquet(**columns) -> bytes:
    target = io.BytesIO()
    pandas.DataFrame(columns).to_parquet(target)
    return target.getvalue()


def arrow(stream: bool) -> bytes:
    sink, table = io.BytesIO(), pyarrow.table({name: [value] for name, value in ROW.items()})
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def read(path: Path, content: str | bytes) -> tuple[list[dict], list[str]]:
    """The rows of a file with this content, and how it was read."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = file_rows(path)
    found = [row.values for row in rows.good()]
    assert [row.values for row in rows.good()] == found  # it can be read again
    return found, rows.remarks


CLEAN = {
    "CSV": ("a.csv", CSV),
    "with a byte order mark": ("a.csv", "\ufeff" + CSV),
    "with carriage returns": ("a.csv", CSV.replace("\n", "\r")),
    "with the line ends of Windows and blank lines": ("a.csv", "\r\n" + CSV.replace("\n", "\r\n\r\n") + ",\r\n"),
    "with blanks behind commas": ("a.csv", 'question, answer\n"Where to?", "Zürich"\n'),
    "tabs": ("a.tsv", CSV.replace(",", "\t")),
    "an index of pandas": ("a.csv", ",question,answer\n0,Where to?,Zürich\n"),
    "JSON lines": ("a.jsonl", JSONL),
    "JSON lines with carriage returns": ("a.ndjson", JSONL.replace("\n", "\r") + "\r"),
    "other letters in the suffix": ("a.JSONLines", JSONL),
    "an array": ("a.json", json.dumps([ROW], indent=2)),
    "an array in one line": ("a.json", json.dumps([ROW])),
    "an object over several lines": ("a.json", json.dumps(ROW, indent=2)),
    "rows under one key": ("a.json", json.dumps({"version": 2, "data": [ROW]})),
    "columns of rows, as pandas writes": ("a.json", json.dumps({key: {"0": value} for key, value in ROW.items()})),
    "lists of columns": ("a.json", json.dumps({key: [value] for key, value in ROW.items()})),
    "columns and data": ("a.json", json.dumps({"columns": [*ROW], "index": [0], "data": [[*ROW.values()]]})),
    "rows by their number": ("a.json", json.dumps({"0": ROW})),
    "Parquet": ("a.parquet", parquet(**{key: [value] for key, value in ROW.items()})),
    "an Arrow file": ("a.arrow", arrow(stream=False)),
    "an Arrow stream": ("a.arrow", arrow(stream=True)),
    "gzip": ("a.csv.gz", gzip.compress(CSV.encode())),
    "bzip2": ("a.csv.bz2", bz2.compress(CSV.encode())),
    "xz": ("a.jsonl.xz", lzma.compress(JSONL.encode())),
    "Zstandard": ("a.jsonl.zst", any_form.compressed(JSONL.encode(), ".zst")),
    "a compression that the name does not say": ("a.jsonl", gzip.compress(JSONL.encode())),
    "a compression that is none": ("a.jsonl.gz", JSONL),
    "Parquet by another name": ("a.jsonl", parquet(**{key: [value] for key, value in ROW.items()})),
}  # fmt: skip


@pytest.mark.parametrize("what", CLEAN)
def test_what_is_plain_is_read_without_a_word(tmp_path, what):
    name, content = CLEAN[what]
    assert read(tmp_path / name, content) == ([ROW], [])


TOLD = {
    "semicolons": ("a.csv", CSV.replace(",", ";"), "with semicolons"),
    "semicolons in texts with commas": ("a.csv", 'question;answer\n"Where to?";"Zürich"\n', "with semicolons"),
    "bars": ("a.csv", CSV.replace(",", "|"), "with vertical bars"),
    "tabs in a CSV": ("a.csv", CSV.replace(",", "\t"), "with tabs"),
    "what Excel says of its separator": ("a.csv", "sep=;\r\n" + CSV.replace(",", ";"), "with semicolons"),
    "quotation marks that are text": (
        "a.tsv",
        'question\tanswer\n"Where" to?\tZürich\n',
        "without quotation marks around texts",
    ),
    "backslashes before quotation marks": (
        "a.csv",
        'question,answer\n"\\"Where\\" to?","Zürich"\n',
        "with backslashes before quotation marks",
    ),
    "Windows-1252": ("a.csv", CSV.encode("cp1252"), "as Windows-1252 (e.g. Zürich)"),
    "Windows-1252 in JSON": ("a.jsonl", JSONL.encode("cp1252"), "as Windows-1252 (e.g. Zürich)"),
    "Windows-1252 in an array": ("a.json", f"[{JSONL}]".encode("cp1252"), "as Windows-1252 (e.g. Zürich)"),
    "UTF-16": ("a.csv", CSV.encode("utf-16"), "as UTF-16"),
    "UTF-16 without a mark": ("a.csv", CSV.encode("utf-16-le"), "as UTF-16"),
    "UTF-16, big end first": ("a.jsonl", JSONL.encode("utf-16-be"), "as UTF-16"),
    "UTF-32": ("a.csv", CSV.encode("utf-32"), "as UTF-32"),
    "JSON in a CSV": ("a.csv", JSONL, "as JSON"),
    "CSV in a JSON": ("a.json", CSV, "as CSV"),
}


@pytest.mark.parametrize("what", TOLD)
def test_what_had_to_be_found_out_is_read_and_told(tmp_path, what):
    name, content, remark = TOLD[what]
    row = ROW | ({"question": '"Where" to?'} if "quotation" in what else {})
    assert read(tmp_path / name, content) == ([row], [remark])


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", ["old Excel workbook", ".xlsx"]),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["Git LFS", "git lfs pull"]),
        ("a.jsonl", "<!DOCTYPE html>\n<html>", ["web page"]),
        ("a.csv", "سؤال,جواب\nأين المستشفى في المدينة,هناك\n".encode("cp1256"), ["not text in UTF-8", "iconv -f"]),
        ("a.csv", b"a,b\n\x00\x01\x02\x00\x00\x03", ["no text"]),
        ("a.json", json.dumps({"a": [ROW], "b": [ROW]}), ["rows under a and b; keep one"]),
        ("a.json", '[{"question": 1}, {"question"', ["line 1: malformed JSON (column 30: "]),
        ("a.csv", 'question,answer\nx,y\nx,"y\n' + "x,y\n" * 9, ["line 3: malformed CSV", "has no end"]),
        ("a.parquet", b"PAR1 nothing PAR1", ["a.parquet cannot be read"]),
        ("a.odt", "x", ["a.odt cannot be read; supported are JSONL"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_read_is_named_as_what_it_is(tmp_path, name, content, parts):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        list(file_rows(path).good())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


LETTERS = {  # what people write in each encoding
    "cp1250": "Która żółta gęś idzie przez ulicę w Łodzi, a która zostaje? Proszę się zgłosić.",
    "cp1251": "Где находится склад? В третьем отсеке, рядом с воротами.",
    "koi8_r": "Где находится склад? В третьем отсеке, рядом с воротами.",
    "cp1252": "Où est l'hôpital? Près de la forêt; ça dépend de l'été. Größe, Übung, ¿mañana?",
    "cp1253": "Πού είναι η αποθήκη; Στην τρίτη θέση, δίπλα στην πύλη.",
    "cp1254": "Depo nerede? Üçüncü bölmede, kapının yanında, ışığın altında.",
    "gb18030": "第三个问题是什么？这是第三个回答，请您再看一下。",
    "big5": "這是第三個問題嗎？是的，請您再看一下。",
    "shift_jis": "どの病棟ですか？外科です。患者は三番の部屋にいます。",
    "euc_jp": "どの病棟ですか？外科です。患者は三番の部屋にいます。",
    "cp949": "어느 병동입니까? 외과입니다. 환자는 세 번째 방에 있습니다.",
}


@pytest.mark.parametrize("codec", LETTERS)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_other_encodings_are_told_by_their_letters(tmp_path, codec, name):
    text = LETTERS[codec].replace(",", ";")
    rows = [{"question": f"{text} {i}", "answer": text} for i in range(3)]
    csv = "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows)
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    content = {"a.csv": csv, "a.jsonl": lines, "a.json": json.dumps(rows, ensure_ascii=False)}[name]
    found, remarks = read(tmp_path / name, content.encode(codec))
    assert found == rows and remarks[0].startswith(f"as {NAMES[codec]} (e.g. ")


def test_a_damaged_byte_in_utf_8_is_one_bad_row(tmp_path):
    """The file is UTF-8 elsewhere, so it is not read as another encoding."""
    lines = [JSONL.encode(), JSONL.encode().replace(b"\xc3\xbc", b"\xc3"), JSONL.encode()]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    rows = list(file_rows(tmp_path / "a.jsonl"))
    assert [getattr(row, "values", None) for row in rows] == [ROW, None, ROW]
    assert isinstance(rows[1], BadRow) and "line 2: bytes that are not UTF-8" in str(rows[1])


def test_bad_lines_are_single_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": \n{"x": 1}\n[2]\n{"x": 3}\n')
    found = list(file_rows(tmp_path / "a.jsonl"))
    assert [getattr(row, "values", str(row).partition(": ")[2][:26]) for row in found] == [
        "malformed JSON (column 1: ", {"x": 1}, "an object with named colum", {"x": 3},
    ]  # fmt: skip
    (tmp_path / "a.csv").write_text('a,b\n1,2\n3\n4,5,6\n"7"x,8\n"9\n9",0,1\n1,2,,\n')
    found = list(file_rows(tmp_path / "a.csv"))
    assert [(row.where[-6:], row.lines) for row in found if isinstance(row, BadRow)] == [
        ("line 3", 1), ("line 4", 1), ("line 5", 1), ("line 6", 2),
    ]  # fmt: skip
    assert [row.values for row in found if not isinstance(row, BadRow)] == [{"a": "1", "b": "2"}] * 2


def test_one_bad_record_does_not_make_quotation_marks_text(tmp_path):
    (tmp_path / "a.csv").write_text('"q","a"\n"1","2"\n"3"x,"4"\n"5","6"\n')
    found = list(file_rows(tmp_path / "a.csv"))
    assert [getattr(row, "values", None) for row in found] == [{"q": "1", "a": "2"}, None, {"q": "5", "a": "6"}]


def test_a_long_cell_is_no_mistake(tmp_path):
    rows, _ = read(tmp_path / "a.csv", f"a,b\nx,{'scan ' * 400_000}\n")
    assert len(rows[0]["b"]) == 2_000_000


def test_a_name_that_is_there_twice_is_noted_with_its_places(tmp_path):
    (tmp_path / "a.csv").write_text("q,a,,a,\n1,2,,3,x\n")
    rows = file_rows(tmp_path / "a.csv")
    assert [row.values for row in rows.good()] == [{"q": "1", "a": "2"}]
    assert rows.twice == {"a": [2, 4]}


def test_an_object_of_splits_and_a_conversation_over_several_lines(tmp_path):
    rows, _ = read(tmp_path / "a.json", json.dumps({"train": [ROW], "test": [ROW]}))
    assert rows == [{**ROW, "split": "train"}, {**ROW, "split": "test"}]
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert read(tmp_path / "a.json", json.dumps(talk, indent=1)) == ([talk], [])


def test_the_place_of_a_mistake_in_an_array_is_that_of_the_file(tmp_path):
    many = [{"question": f"é {i}", "answer": "x" * (i % 150)} for i in range(300)]
    assert read(tmp_path / "a.json", json.dumps(many, ensure_ascii=False))[0] == many
    assert read(tmp_path / "a.json", json.dumps(many, indent=2))[0] == many
    text = json.dumps(many[:50], indent=0)
    (tmp_path / "a.json").write_text(text[:-3] + " ?")
    with pytest.raises(UserError, match=f"line {text[:-3].count(chr(10)) + 1}: malformed JSON"):
        list(file_rows(tmp_path / "a.json").good())


def test_workbooks(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in ([None], ["question", "answer", "day"], ["Is it?", 3.0, datetime(2024, 1, 2)], [], ["Is it not?", 2]):
        book.active.append(row)
    book.create_sheet("notes").append(["more"])
    book.save(tmp_path / "a.xlsx")
    rows = file_rows(tmp_path / "a.xlsx")
    assert [row.values["answer"] for row in rows.good()] == [3, 2]
    assert [row.where[-5:] for row in rows.good()] == ["row 3", "row 5"] and rows.remarks == [
        "without its sheet 'notes'"
    ]
    (tmp_path / "a.csv").write_bytes((tmp_path / "a.xlsx").read_bytes())
    assert len(list(file_rows(tmp_path / "a.csv").good())) == 2
    (tmp_path / "b.xlsx").write_bytes((tmp_path / "a.xlsx").read_bytes()[:900])
    with pytest.raises(UserError, match="b.xlsx cannot be read"):
        list(file_rows(tmp_path / "b.xlsx").good())


def test_whatever_a_library_says_of_bytes_that_it_does_not_expect(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    openpyxl.Workbook().save(tmp_path / "a.xlsx")
    whole = (tmp_path / "a.xlsx").read_bytes().split(b"PK\x01\x02")  # the list of files, and how each is compressed
    parts = [part[:6] + b"\x63" + part[7:] for part in whole[1:]]
    (tmp_path / "a.xlsx").write_bytes(b"PK\x01\x02".join([whole[0], *parts]))
    (tmp_path / "a.arrow").write_bytes(arrow(stream=False).replace(b"question", b"quest\xc4\xffn"))
    for name, said in (("a.xlsx", "That compression method is not supported"), ("a.arrow", "'utf-8' codec")):
        with pytest.raises(UserError, match=f"{name} cannot be read: {said}.*; write it again, or leave it out"):
            list(file_rows(tmp_path / name).good())


def cards_rows(source, data):
    """Of a made-up kind of file: the tables of TOML under `rows`; whatever else stands there is a bad row."""
    for number, record in enumerate(tomllib.loads("".join(data.lines()))["rows"], 1):
        yield source.row(f", item {number}", record)


NEEDED = "an object with named columns is needed, got"
CARDS = {
    "a table": ('[[rows]]\nquestion = "Where?"\nday = 2024-05-17', {"question": "Where?", "day": date(2024, 5, 17)}),
    "a date": ("rows = [2024-05-17]", f'{NEEDED} "2024-05-17"'),
    "dates": ("rows = [[1, 2024-05-17T10:00:00]]", f'{NEEDED} [1, "2024-05-17 10:00:00"]'),
}  # fmt: skip


@pytest.mark.parametrize("what", CARDS)
def test_a_new_kind_of_file_is_one_entry_and_one_reader(tmp_path, monkeypatch, what):
    content, expected = CARDS[what]
    (tmp_path / "a.cards").write_text(content)
    with pytest.raises(UserError, match="a.cards cannot be read; supported are JSONL, .* XLSX or TXT"):
        list(file_rows(tmp_path / "a.cards"))
    monkeypatch.setitem(formats.KINDS, "cards", formats.FileKind("CARDS", (".cards",), by_library=True))
    monkeypatch.setattr(readers, "cards_rows", cards_rows, raising=False)
    (row,) = file_rows(tmp_path / "a.cards")
    assert (str(row) if isinstance(row, BadRow) else row.values) == (
        f"{tmp_path}/a.cards, item 1: {expected}" if isinstance(expected, str) else expected
    )
    (tmp_path / "b.cards.gz").write_bytes(gzip.compress(b"rows = ["))
    with pytest.raises(UserError, match="b.cards.gz cannot be read: .*; write it again, or leave it out"):
        list(file_rows(tmp_path / "b.cards.gz"))
