"""Numbers that are none, in data files: they never become text; pictures and folders of strange shapes."""

import json

import pytest

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import TaskConfig

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]}
TALK = [{"role": "user", "content": "hi"}, CALL, {"role": "tool", "content": "r"}]


def loaded(folder, row) -> str:
    (folder / "ada").mkdir(exist_ok=True)
    lines = [{**row, "n": number} for number in range(4)]
    (folder / "ada" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    client = tasks.load(TaskConfig("files", str(folder)), 0).clients["ada"]
    return str([*client.train, *client.test])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_no_number_becomes_text(tmp_path, number):
    assert "1.5" in loaded(tmp_path, {"prompt": 1.5, "completion": "a"})
    for row in ({"prompt": number, "completion": "a"}, {"prompt": "q", "completion": ["a", number]}):
        with pytest.raises(UserError, match="line 1: column '(prompt|completion)' holds (nothing|infinity)"):
            loaded(tmp_path, row)
    talk = [*TALK, {"role": "assistant", "content": "done"}]
    assert "1.5" in loaded(tmp_path, {"messages": talk})
    strange = json.loads(json.dumps(talk).replace("1.5", json.dumps(number)))
    with pytest.raises(UserError, match="line 1.* holds a number that JSON has not"):
        loaded(tmp_path, {"messages": strange})
