"""digests.jsonl: a run that dies at any write ends with the same file, and a run of an older version begins one."""

import json
import shutil

import pytest
import toy_rounds

from llm_fed.basics.errors import RunError
from llm_fed.runs import digests
from llm_fed.scoring.scores import summarize


def go(folder, rounds=3, **options):
    return toy_rounds.go(
        folder, rounds=rounds, evaluate=lambda messages, split: summarize("m", dict.fromkeys(messages, 1.0)), **options
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(folder)
    chain = digests.read(folder, finished=False)
    assert [line["kind"] for line in chain.lines] == ["begin", "round", "round", "round"] and not chain.flaws
    return folder


def test_files_that_somebody_changed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", stop_after=2)
    path = tmp_path / "run" / digests.FILE
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(RunError, match="it was truncated. Start again with --fresh"):
        go(tmp_path / "run")
    path.write_bytes(b"x" + data)
    with pytest.raises(RunError, match="is damaged: .*--fresh"):
        go(tmp_path / "run")


def test_a_line_whose_own_link_was_made_anew_does_not_fit_the_next_one(whole, tmp_path):
    """So whoever changes a line has to change all that follow."""
    folder = shutil.copytree(whole, tmp_path / "run")
    lines = [json.loads(line) for line in (folder / digests.FILE).read_text().splitlines()]
    changed = {**{key: value for key, value in lines[1].items() if key != "chain"}, "due": not lines[1]["due"]}
    text = lines[0]["chain"] + json.dumps(changed, ensure_ascii=False)
    lines[1] = {**changed, "chain": digests.digest(text.encode())}
    (folder / digests.FILE).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    flaws = digests.read(folder, finished=False).flaws
    assert flaws == [(2, f"the line 'round' of {digests.FILE} does not follow from the line before it")]
