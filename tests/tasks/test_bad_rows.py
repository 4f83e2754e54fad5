"""Rows that cannot be used: each ends the reading with file, line and a way out, or is left out, counted and listed."""

import json
from pathlib import Path

import pytest
from jsonl import records, write

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.runs.records import read_records
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import TaskData

GOOD = {"instruction": "q", "output": "a"}
U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TALK = {"messages": [U, A]}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": float("nan")}}}]}
BAD = {  # a bad row among good ones, and what is said of it
    "an empty answer": (GOOD, GOOD | {"output": " "}, "column 'output' is empty"),
    "an answer that is missing": (GOOD, {"instruction": "q"}, "the column 'output' is missing"),
    "null": (GOOD, GOOD | {"output": None}, "column 'output' holds nothing"),
    "NaN": (GOOD, GOOD | {"output": float("nan")}, "column 'output' holds nothing"),
    "infinity": (GOOD, GOOD | {"instruction": float("inf")}, "column 'instruction' holds infinity"),
    "infinity in a list": (GOOD, GOOD | {"output": ["a", float("-inf")]}, "column 'output' holds infinity"),
    "a call with a number that is none": (
        TALK, {"messages": [U, CALL, {"role": "tool", "content": "r"}, A]}, "holds a number that JSON has not",
    ),
    "an object": (GOOD, GOOD | {"instruction": {"x": 1}}, "column 'instruction' holds dict, not text"),
    "an empty list": (GOOD, GOOD | {"output": []}, "the list in column 'output' is empty"),
    "an answer that is no option": (
        GOOD, GOOD | {"output": "zz", "options": ["b", "c"]}, "the answer 'zz' is none of the options",
    ),
    "a history that is none": (GOOD, GOOD | {"history": [["q"]]}, "column 'history' is no list of pairs"),
    "no object": (GOOD, [1], "an object with named columns is needed"),
    "roles out of order": (TALK, {"messages": [U, U, A]}, "a message of the user where one of the assistant belongs"),
    "an unknown role": (TALK, {"messages": [{"role": "narrator", "content": "q"}, A]}, "it needs a role"),
    "content that is null": (TALK, {"messages": [U, A | {"content": None}]}, "message 2 in column 'messages' is"),
    "content that is a picture": (
        TALK, {"messages": [U | {"content": [{"type": "image_url", "image_url": "x"}]}, A]}, "image_url",
    ),
    "no answer at the end": (TALK, {"messages": [U]}, "does not end with a message of the assistant"),
    "no messages": (TALK, {"messages": []}, "holds no list of messages"),
}  # fmt: skip


def load(path: Path, **settings) -> TaskData:
    return tasks.load(TaskConfig(name="files", path=str(path), validation=0.0, **settings), 0)


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_stops_or_is_left_out(tmp_path, what):
    good, bad, reason = BAD[what]
    write(tmp_path / "n-train.jsonl", [good] * 9 + [bad] + [good] * 10)
    write(tmp_path / "n-test.jsonl", [good])
    with pytest.raises(UserError, match="n-train.jsonl, line 10: .*; or set task.bad_rows=skip to leave") as refused:
        load(tmp_path)
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    data = load(tmp_path, bad_rows="skip")
    assert len(data.clients["n"].train) == 19 and data.reading is not None
    (line,) = data.reading.skipped_lines()
    assert line["where"] == "n-train.jsonl, line 10" and reason in line["reason"] and line["rows"] == 1
    assert data.reading.for_people()["left out"].startswith(
        "1 of 21 rows (task.bad_rows=skip): n-train.jsonl, line 10: "
    )


def test_lines_that_are_no_rows(tmp_path):
    path = tmp_path / "n.jsonl"
    path.write_text("\n".join([json.dumps(GOOD)] * 20 + ['{"instruction": "q", "outp', json.dumps(GOOD)]))
    with pytest.raises(UserError, match="n.jsonl, line 21: malformed JSON .*task.bad_rows=skip"):
        load(tmp_path)
    assert load(tmp_path, bad_rows="skip").reading.rows == 22
    path.unlink()
    (tmp_path / "n.csv").write_text("question,answer\n" + "q,a\n" * 20 + "q,a,more\n" + "q\n" + "q,a\n")
    data = load(tmp_path, bad_rows="skip")
    assert [each.where[-7:] for each in data.reading.skipped] == ["line 22", "line 23"]


def test_too_many_are_refused(tmp_path):
    write(tmp_path / "n.jsonl", [GOOD] * 8 + [GOOD | {"output": ""}])
    with pytest.raises(UserError, match="1 of 9 rows cannot be used, more than the 10% that task.bad_rows=skip leaves"):
        load(tmp_path, bad_rows="skip")
    write(tmp_path / "s.jsonl", [GOOD] * 20)
    assert len(load(tmp_path, bad_rows="skip").clients["n"].train) == 8  # equal rows are not parted
    write(tmp_path / "w.jsonl", [GOOD | {"output": ""}])
    with pytest.raises(
        UserError, match="none of the 1 rows of .*w.jsonl can be used: .*line 1: column 'output' is emp"
    ):
        load(tmp_path, bad_rows="skip")


def test_a_cell_that_swallows_lines_counts_as_all_of_them(tmp_path):
    """A quotation mark that is closed 30 lines later makes one bad record of 30 rows."""
    lines = ["question,answer"] + ["q,a"] * 20 + ['q,"a'] + ["q,a"] * 29 + ['q,a"'] + ["q,a"] * 20
    (tmp_path / "n.csv").write_text("\n".join(lines).replace('q,"a', 'q,x,"a'))
    with pytest.raises(UserError, match="31 of 71 rows cannot be used"):
        load(tmp_path, bad_rows="skip")


def test_a_run_lists_what_it_left_out_and_what_it_did_not_use(small, llm_fed, tmp_path):
    rows = [{"instruction": f"w{20 + i} w21", "output": "w4 w5", "source": "x"} for i in range(20)]
    for client in ("ada", "bob"):
        write(tmp_path / "data" / f"{client}.jsonl", [*rows, {"instruction": "w3", "output": ""}])
    (tmp_path / "data" / "README.md").touch()
    config = small.config(tmp_path / "c.yaml", rounds=1, task={"path": str(tmp_path / "data"), "bad_rows": "skip"})
    said = llm_fed("run", config, "--dry-run").out
    assert "not used   README.md; column source\n" in said
    assert "left out   2 of 42 rows (task.bad_rows=skip): ada.jsonl, line 21: column 'output' is empty" in said
    ran = llm_fed("run", config, "--out", tmp_path / "run")
    assert ran.code == 0 and ran.err.count("not used") == 1 and ran.err.count("README.md") == 1
    events = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "event"]
    assert [event["event"] for event in events] == ["not used", "rows left out"]
    assert "README.md" in events[0]["reason"] and events[1]["reason"].startswith("2 of 42 rows")
    listed = [json.loads(line) for line in (tmp_path / "run/bad_rows.jsonl").read_text().splitlines()]
    assert [each["where"] for each in listed] == ["ada.jsonl, line 21", "bob.jsonl, line 21"]
    llm_fed("run", config, "task.bad_rows=stop", "--out", tmp_path / "other").assert_refused("ada.jsonl, line 21")
    assert llm_fed("run", config, "--fresh", "--out", tmp_path / "run").code == 0


def test_init_leaves_bad_rows_out_and_says_so(small, llm_fed, tmp_path):
    write(tmp_path / "d" / "n.jsonl", [*records(30), {"instruction": "q", "output": ""}])
    said = llm_fed("init", tmp_path / "d", "--base", small.base, "--out", tmp_path / "c.yaml")
    assert "warning    left out are 1 of 31 rows (task.bad_rows=skip): n.jsonl, line 31" in said.out
    assert "  bad_rows: skip  # 1 cannot be used" in (tmp_path / "c.yaml").read_text()
