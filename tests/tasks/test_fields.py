"""Columns that mean something: each becomes part of the Example, or is named as not used."""

import csv
import json
from pathlib import Path

import pandas
import pytest
from jsonl import write

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import ColumnsConfig, PartitionConfig, TaskConfig
from llm_fed.tasks.common import Example, TaskData, Turn


def load(path: Path, **settings) -> TaskData:
    return tasks.load(TaskConfig(name="files", path=str(path), validation=0.0, **settings), 0)


def read(folder: Path, *rows: dict, **settings) -> tuple[Example, ...]:
    """The rows as training examples of one client; as JSON lines, and with the same outcome as CSV."""
    write(folder / "n-train.jsonl", list(rows))
    write(folder / "n-test.jsonl", list(rows))
    return tuple(load(folder, **settings).clients["n"].train)


def said(folder: Path, **settings) -> dict[str, str]:
    reading = load(folder, **settings).reading
    assert reading is not None
    return reading.for_people()


ASKED = Turn("user", "Which ward?")
FORMS = {
    "a system text": (
        {"instruction": "Which ward?", "output": "Burns.", "system": "You are a clerk."},
        Example((Turn("system", "You are a clerk."), ASKED), ("Burns.",), (), "n"),
    ),
    "an empty system text and an empty history": (
        {"instruction": "Which ward?", "output": "Burns.", "system": "", "history": []},
        Example("Which ward?", ("Burns.",), (), "n"),
    ),
    "system_prompt": (
        {"system_prompt": "Be brief.", "question": "Which ward?", "response": "Burns."},
        Example((Turn("system", "Be brief."), ASKED), ("Burns.",), (), "n"),
    ),
    "a history of pairs": (
        {"instruction": "Which ward?", "input": "A burn.", "output": "Burns.",
         "history": [["Who?", "I."], ["So?", "No."]]},
        Example(
            (Turn("user", "Who?"), Turn("assistant", "I."), Turn("user", "So?"), Turn("assistant", "No."),
             Turn("user", "Which ward?\n\nA burn.")), ("Burns.",), (), "n",
        ),
    ),
    "a conversation with a system column": (
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "Which ward?"},
                                                  {"from": "gpt", "value": "Burns."}]},
        Example((Turn("system", "Be brief."), ASKED), ("Burns.",), (), "n"),
    ),
    "parts of text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Which "},
                                                   {"type": "text", "text": "ward?"}]},
                      {"role": "assistant", "content": "Burns."}]},
        Example((ASKED,), ("Burns.",), (), "n"),
    ),
    "TRL's prompt and completion": (
        {"prompt": [{"role": "user", "content": "Which ward?"}],
         "completion": [{"role": "assistant", "content": "Burns."}]},
        Example((ASKED,), ("Burns.",), (), "n"),
    ),
    "a prompt of messages and a text": (
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which ward?"}],
         "completion": "Burns."},
        Example((Turn("system", "Be brief."), ASKED), ("Burns.",), (), "n"),
    ),
    "choices and the place of the right one (MMLU)": (
        {"question": "Which ward?", "choices": ["Surgery.", "Burns."], "answer": 1},
        Example("Which ward?", ("Burns.",), ("Surgery.", "Burns."), "n"),
    ),
    "choices and a letter": (
        {"question": "Which ward?", "choices": ["Surgery.", "Burns."], "answer": "B"},
        Example("Which ward?", ("Burns.",), ("Surgery.", "Burns."), "n"),
    ),
    "labelled choices (ARC)": (
        {"question": "Which ward?", "choices": {"text": ["Surgery.", "Burns."], "label": ["1", "2"]}, "answerKey": "2"},
        Example("Which ward?", ("Burns.",), ("Surgery.", "Burns."), "n"),
    ),
    "options by letter (MedQA)": (
        {"question": "Which ward?", "options": {"A": "Surgery.", "B": "Burns."}, "answer": "B"},
        Example("Which ward?", ("Burns.",), ("Surgery.", "Burns."), "n"),
    ),
    "a column for each option (C-Eval)": (
        {"question": "Which ward?", "A": "Surgery.", "B": "Burns.", "answer": "B"},
        Example("Which ward?", ("Burns.",), ("Surgery.", "Burns."), "n"),
    ),
    "endings (HellaSwag)": (
        {"ctx": "Which ward?", "endings": ["Surgery.", "Burns."], "label": "1"},
        Example("Which ward?", ("Burns.",), ("Surgery.", "Burns."), "n"),
    ),
    "answers (SQuAD)": (
        {"question": "Which ward?", "context": "A burn.",
         "answers": {"text": ["Burns.", "burns"], "answer_start": [0, 3]}},
        Example("Which ward?\n\nA burn.", ("Burns.", "burns"), (), "n"),
    ),
    "a text": ({"text": "A text that is learned."}, Example("", ("A text that is learned.",), (), "n")),
    "other letters in names": (
        {"Question": "Which ward?", "ANSWER": "Burns."}, Example("Which ward?", ("Burns.",), (), "n"),
    ),
    "the exact name before one in other letters": (
        {"Question": "no", "question": "Which ward?", "answer": "Burns."},
        Example("Which ward?", ("Burns.",), (), "n"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FORMS)
def test_forms_of_a_row(tmp_path, what):
    row, example = FORMS[what]
    assert read(tmp_path, row, row) == (example, example)


@pytest.mark.parametrize("what", FORMS)
@pytest.mark.parametrize("spelled", [json.dumps, str])
def test_lists_may_be_written_out_in_a_csv(tmp_path, what, spelled):
    """As JSON, or as pandas writes a list, which is Python's way."""
    row, example = FORMS[what]
    for split in ("train", "test"):
        with open(tmp_path / f"n-{split}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, row)
            writer.writeheader()
            writer.writerow({k: spelled(v) if isinstance(v, list | dict) else v for k, v in row.items()})
    assert tuple(load(tmp_path).clients["n"].train) == (example,)


def test_a_column_within_another(tmp_path):
    row = {"ticket": {"question": "Which ward?", "by": {"desk": "n"}}, "a": "Burns."}
    wanted = ColumnsConfig(prompt="ticket.question", answer="a")
    assert read(tmp_path, row, columns=wanted) == (Example("Which ward?", ("Burns.",), (), "n"),)
    wanted = ColumnsConfig("ticket.question", answer="a", client="ticket.by.desk")
    found = load(write(tmp_path / "n-train.jsonl", [row, row]), columns=wanted)
    assert [*found.clients] == ["n"] and not found.reading.for_people()
    with pytest.raises(UserError, match="'ticket.qestion' is missing"):
        read(tmp_path, row, columns=ColumnsConfig(prompt="ticket.qestion", answer="a"))
    with pytest.raises(UserError, match="'tickt.question' is not a column .the closest is 'ticket.question'"):
        read(tmp_path, row, columns=ColumnsConfig(prompt="tickt.question", answer="a"))


def options(*rows: tuple[list, object], name: str) -> list[dict]:
    return [{"question": f"q{i}", name: found, "answer": answer} for i, (found, answer) in enumerate(rows)]


def test_whether_a_number_is_an_option_or_its_place_is_decided_by_the_whole_file(tmp_path):
    """2 is an option of the first row and the place of another one; the second row can only be a place."""
    rows = options((["1", "2", "3"], 2), (["5", "6", "7"], 0), name="options")
    assert [each.answers for each in read(tmp_path, *rows)] == [("3",), ("5",)]
    rows = options((["1", "2", "3"], 2), (["5", "6", "7"], 6), name="choices")
    assert [each.answers for each in read(tmp_path, *rows)] == [("2",), ("6",)]
    rows = options((["1", "2", "3"], 2), (["0", "1", "2"], 1), name="options")  # nothing decides: the texts
    assert [each.answers for each in read(tmp_path, *rows)] == [("2",), ("1",)]
    rows = options((["1", "2", "3"], 2), name="choices")  # the places, as in MMLU
    assert [each.answers for each in read(tmp_path, *rows)] == [("3",)]
    rows = options((["1", "2", "3"], 2), (["5", "6"], 6), (["7", "8"], 1), name="options")
    with pytest.raises(UserError, match="line 1: the answer '2' is an option and also the place of another one"):
        read(tmp_path, *rows)
    with pytest.raises(UserError, match=r"line 1: the answer '4' is none of the options \['5', '6'\]"):
        read(tmp_path, *options((["5", "6"], 4), name="choices"))


def test_columns_that_later_rows_show(tmp_path):
    """The 300th row has one that a row may lack; where it would change what those before say, it is refused."""
    rows = [{"question": f"q{i}", "answer": "a"} for i in range(300)]
    rows.append({"question": "q", "answer": "a", "context": "c"})
    found = read(tmp_path, *rows)
    assert (found[0].prompt, found[300].prompt) == ("q0", "q\n\nc") and len(found) == 301
    with pytest.raises(UserError, match="line 302: it has columns that no row before .* set task.columns.prompt=COL"):
        read(tmp_path, *rows, {"instruction": "q", "answer": "a"})
    rows = options(*[(["1", "2", "3"], 2)] * 300, (["5", "6", "7"], 0), name="options")
    with pytest.raises(UserError, match="line 301: the answer '2' is an option and also the place of another one, and"):
        read(tmp_path, *rows)


def test_the_same_number_is_the_same_text_and_the_same_client(tmp_path):
    for split, kind in (("train", int), ("test", float)):
        frame = pandas.DataFrame(
            {"client": [kind(11), kind(12)] * 2, "question": list("abcd"), "answer": [kind(1), kind(0)] * 2}
        )
        frame.to_parquet(tmp_path / f"{split}.parquet")
    found = load(tmp_path)
    assert [*found.clients] == ["11", "12"] and not found.reading.for_people()
    assert found.clients["11"].test[0].answers == found.clients["11"].train[0].answers == ("1",)


def test_a_column_of_splits(tmp_path):
    rows = [{"client": c, "question": f"q{i}", "answer": "a", "split": s} for c in "xy"
            for i, s in enumerate(["train", "train", "Test", "dev"])]  # fmt: skip
    write(tmp_path / "all.jsonl", rows)
    found = load(tmp_path / "all.jsonl").clients
    assert [(len(c.train), len(c.validation), len(c.test)) for c in found.values()] == [(2, 1, 1)] * 2
    write(tmp_path / "all.jsonl", [row | {"split": "A"} for row in rows])
    assert said(tmp_path / "all.jsonl") == {"not used": "column split"} | {
        "note": "column 'split' is not used: the names of files say the split"
    }


def test_two_columns_of_one_name_are_refused_only_if_they_are_used(tmp_path):
    (tmp_path / "n.csv").write_text("question,answer,note,note\na,b,c,d\ne,f,g,h\n")
    assert said(tmp_path) == {"not used": "column note"}
    (tmp_path / "n.csv").write_text("question,answer,answer\na,b,c\n")
    with pytest.raises(UserError, match="n.csv: columns 2 and 3 are both named 'answer'; rename"):
        load(tmp_path)


def test_what_is_not_used_is_named_and_clean_data_are_silent(tmp_path):
    rows = [{"id": i, "question": f"q{i}", "answer": "a", "Unnamed: 0": i} for i in range(4)]
    write(tmp_path / "n.jsonl", rows)
    assert said(tmp_path) == {}
    write(tmp_path / "n.jsonl", [row | {"source": "x", "weight": 0, "tools": [], "client": "c"} for row in rows])
    (tmp_path / "README.md").touch()
    (tmp_path / "s.jsonl").touch()
    assert said(tmp_path) == {
        "not used": "s.jsonl (no rows), README.md; columns source, weight, tools, client",
        "note": "column 'weight' is not used: all rows count alike; column 'tools' is not used: prompts do not "
        "describe tools; column 'client' is not used: files name the clients; task.columns.client=client would use it",
    }


def test_what_is_no_data_and_which_columns_each_file_has_is_said(tmp_path):
    write(tmp_path / "n.jsonl", [{"question": f"q{i}", "answer": "a"} for i in range(4)])
    (tmp_path / "metadata.json").write_text(json.dumps({"license": "x", "features": ["question"]}, indent=2))
    assert [*load(tmp_path).clients] == ["n"] and said(tmp_path) == {"not used": "metadata.json"}
    with pytest.raises(UserError, match="metadata.json: no column for the prompt among license, features"):
        load(tmp_path / "metadata.json")
    (tmp_path / "s.csv").write_text("prompt,answer,\na,b,\nc,d,e\n")
    assert said(tmp_path) == {
        "not used": "metadata.json", "read": "s.csv without column 3, which has no name",
        "columns": "prompt = question, answer = answer in n.jsonl; prompt = prompt, answer = answer in s.csv",
    }  # fmt: skip


def test_names_that_cannot_be_written_are_told_all_the_same(tmp_path):
    write(tmp_path / "n.jsonl", [{"question": f"q{i}", "answer": "a"} for i in range(4)])
    (tmp_path / "n.jsonl").write_text((tmp_path / "n.jsonl").read_text().replace("{", '{"\\ud83d": 1, '))
    (tmp_path / "\udcff.docx").touch()
    reading = load(tmp_path).reading
    assert reading.for_people() == {"not used": "?.docx; column ?"}
    assert json.dumps(reading.events(), ensure_ascii=False).encode()


def test_a_setting_of_a_column_that_has_no_effect_is_refused(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write(tmp_path / "n.jsonl", [{"messages": talk, "text": "t", "input": "i", "question": "q", "answer": "a"}] * 2)
    with pytest.raises(UserError, match="task.columns.input=input would have no effect, since the column for messages"):
        load(tmp_path, columns=ColumnsConfig(messages="messages", input="input"))
    with pytest.raises(UserError, match="task.columns.prompt=question would have no effect, since the column for text"):
        load(tmp_path, columns=ColumnsConfig(text="text", prompt="question"))
    assert load(tmp_path, columns=ColumnsConfig(text="text")).clients["n"].train[0].answers == ("t",)


def test_names_of_clients_that_no_folder_can_have(tmp_path):
    rows = [{"client": c, "question": f"q{i}", "answer": "a"} for i in range(2) for c in ("x/y", "a\tb", "..", "50%")]
    write(tmp_path / "all.jsonl", rows)
    found = load(tmp_path / "all.jsonl")
    assert [*found.clients] == ["50%", "%2E%2E", "a%09b", "x%2Fy"]
    assert "client 'x/y' is called 'x%2Fy', since no folder can have its name" in found.reading.for_people()["note"]
    write(tmp_path / "all.jsonl", [*rows, rows[0] | {"client": "x%2Fy"}])
    with pytest.raises(UserError, match="the clients 'x/y' and 'x%2Fy' would both be called 'x%2Fy'; rename one"):
        load(tmp_path / "all.jsonl")


def test_a_client_in_two_normal_forms_is_one_and_is_found_by_either(tmp_path):
    apart, whole = "Zu\u0308rich", "Z\u00fcrich"
    write(tmp_path / f"{apart}-train.jsonl", [{"question": "q", "answer": "a"}] * 2)
    write(tmp_path / f"{whole}-test.jsonl", [{"question": "q", "answer": "a"}])
    write(tmp_path / "Bern.jsonl", [{"question": "q", "answer": "a"}] * 2)
    assert {name: len(client.test) for name, client in load(tmp_path).clients.items()} == {"Bern": 0, whole: 1}
    assert [*load(tmp_path, groups=(apart,)).clients] == [whole]
    write(tmp_path / "all.jsonl", [{"client": c, "question": "q", "answer": "a"} for c in (apart, whole)])
    assert [*load(tmp_path / "all.jsonl").clients] == [whole]


def test_texts_in_files_of_their_own(tmp_path):
    for client in "ns":
        for number in range(3):
            (tmp_path / client).mkdir(exist_ok=True)
            (tmp_path / client / f"{number}.txt").write_text(f"Text {number}\nof {client}.\n")
    found = load(tmp_path)
    assert [*found.clients] == ["n", "s"] and not found.reading.for_people()
    texts = sorted(each.answers[0] for each in [*found.clients["n"].train, *found.clients["n"].test])
    assert texts == [f"Text {number}\nof n." for number in range(3)]
    whole = load(tmp_path / "n", partition=PartitionConfig("iid", clients=1))
    assert sum(len(c.train) + len(c.test) for c in whole.clients.values()) == 3
