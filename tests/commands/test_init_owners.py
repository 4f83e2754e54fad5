"""The column that names the client of a row: chosen where its name is plain, never a label."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from llm_fed import tasks
from llm_fed.rows import file_rows, owners
from llm_fed.settings import configfile

DESKS = ("bank", "hotel", "clinic", "library", "phone shop")


def write(path: Path, count: int, **columns: Any) -> Path:
    """Rows with a question, an answer and these columns, each a function of the row's number."""
    rows = [
        {"question": f"w{n} w{n % 7}?", "answer": f"w{n % 11} w{n % 3}"}
        | {name: value(n) for name, value in columns.items()}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found(path: Path) -> str | None:
    clients = owners.find([file_rows(path)], ("question", "answer"))
    return clients and clients[0]


@pytest.mark.parametrize("folder", [False, True])
def test_desk_has_five_values_in_540_rows(small, llm_fed, tmp_path, folder):
    (tmp_path / "rows").mkdir()
    path = write(tmp_path / "rows" / "all.jsonl", 540, desk=lambda n: DESKS[n // 108], note=lambda n: f"note {n}")
    path = path.parent if folder else path
    said = llm_fed("init", path, "--base", small.base, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and "by the column desk (5 values); --client chooses another" in said.out
    assert configfile.load(tmp_path / "c.yaml").task.columns.client == "desk"


@pytest.mark.parametrize(
    "name",
    ["hospital", "hospital_id", "HospitalName", "Site ID", "store", "branch", "user_id", "userName", "Filiale",
     "department", "clinics", "医院名称", "office location"],
)  # fmt: skip
def test_names_of_holders_are_plain(tmp_path, name):
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": f"a{n % 9}", name: f"x{n % 4}"}) + "\n"
                            for n in range(80)))  # fmt: skip
    assert found(path) == name


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", ("yes", "no")), ("category", ("loans", "cards")), ("split", ("train", "test")),
        ("language", ("de", "fr")), ("lang", ("de", "fr")), ("year", (2019, 2020)), ("rating", (1, 2, 3, 4, 5)),
        ("user_type", ("gold", "basic")), ("customer_sentiment", ("good", "bad")), ("difficulty", ("easy", "hard")),
        ("verified", (True, False)), ("amount", (0.5, 1.5)), ("kind_of_text", ("a", "b")), ("colour", ("red", "blue")),
        ("speaker", ("user", "assistant")), ("number", (3, 4)),
    ],
)  # fmt: skip
def test_properties_of_rows_are_not_taken(small, llm_fed, tmp_path, name, values):
    path = tmp_path / "all.jsonl"
    draw = random.Random(name)
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": f"a{n % 9}", name: draw.choice(values)}) + "\n"
                            for n in range(80)))  # fmt: skip
    assert found(path) is None
    said = llm_fed("init", path, "--base", small.base, "--out", tmp_path / "c.yaml")
    said.assert_refused("no column names the clients", "--client COLUMN, or --clients N")


def test_a_field_within_a_column_may_be_the_one(small, llm_fed, tmp_path):
    path = write(tmp_path / "all.jsonl", 90, ticket=lambda n: {"desk": DESKS[n % 3], "number": n})
    assert llm_fed("init", path, "--base", small.base, "--out", tmp_path / "c.yaml").code == 0
    config = configfile.load(tmp_path / "c.yaml")
    assert config.task.columns.client == "ticket.desk" and len(tasks.load(config.task, 0).clients) == 3


def test_columns_with_many_values_or_gaps_are_no_clients(tmp_path):
    path = write(
        tmp_path / "all.jsonl", 60, user_id=lambda n: n, clinic=lambda n: f"c{n % 3}" if n % 5 == 0 else None,
        store=lambda n: "only one", desk=lambda n: ["a", "b"], note=lambda n: "long " * 30 + str(n % 2),
    )  # fmt: skip
    assert found(path) is None
