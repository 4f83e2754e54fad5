"""llm-fed init: what it sees in a user's data, and that the configuration it writes runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_fed.basics import documents
from llm_fed.commands import init, known_base, survey
from llm_fed.settings import configfile
from llm_fed.settings.config import ColumnsConfig
from llm_fed.tasks.common import ClientData, Example, TaskData


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def rows(count: int, prompt: str, answer: str, offset: int = 0) -> list[dict[str, Any]]:
    return [{prompt: f"w{20 + (offset + i) % 20} w{20 + i // 20}", answer: f"w{i % 3}"} for i in range(count)]


def test_five_files_become_a_configuration_that_runs(small, llm_fed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("north", "south", "east", "west", "up and down"):
        write(Path("my data") / f"{name}.jsonl", rows(40, "question", "reply"))
    said = llm_fed("init", "my data", "--base", small.base)
    assert said.code == 0, said.err
    assert "5: east, north, south, up and down, west" in said.out
    assert "prompt = question, answer = reply" in said.out
    assert "29 per client for training; 30 for validation and 25 for testing" in said.out
    assert "look-up    25 of 25 tested answers stand in the client's own training rows" in said.out
    config = configfile.load("my data.yaml")
    assert (config.task.path, config.base.name) == ("my data", str(small.base))
    assert config.method == {"name": "local"} and config.eval.base is True
    assert (config.eval.metric, config.task.template) == ("exact_match", "alpaca-short")
    assert "compare 'my data.yaml' --out 'runs/compare-my data'" in said.out
    assert "chat 'runs/compare-my data/local-seed0'" in said.out
    assert (
        "local (nothing was shown to be better where clients are unlike" in said.out
        and "local, fedit, fedlora, fedalt" in said.out
    )
    ran = llm_fed("run", "my data.yaml", "rounds=1", "local.steps=1", "--out", "runs/my data")
    assert ran.code == 0 and "exact_match" in ran.out
    llm_fed("init", "my data", "--base", small.base).assert_refused("my data.yaml already exists", "--force")
    assert llm_fed("init", "my data", "--base", small.base, "--force", "--method", "fedit").code == 0
    assert configfile.load("my data.yaml").method == {"name": "fedit"}
    llm_fed("init", "my data", "--base", small.base, "--force", "--method", "fedmrge").assert_refused("fedmrge")


@pytest.mark.parametrize("more, lr", [({}, 3e-3), ({"rejected": "w9"}, 1e-3)])
def test_a_narrow_base_learns_answers_in_larger_steps_than_preferences(small, llm_fed, tmp_path, more, lr):
    answer = "chosen" if more else "answer"
    write(tmp_path / "a.jsonl", [{"prompt": f"w{20 + i}", answer: f"w{i % 3}", **more} for i in range(40)])
    words = ["--base", small.base, "--clients", "2", "--out", tmp_path / "c.yaml"]
    said = llm_fed("init", tmp_path / "a.jsonl", *words)
    assert said.code == 0, said.err
    local = configfile.load(tmp_path / "c.yaml").local
    assert (local.lr, local.lr_end) == pytest.approx((lr, lr / 10))


def test_each_file_has_columns_of_its_own(small, llm_fed, tmp_path):
    """Where no column has a usual name, `--prompt` is asked for; it is a column of all files then."""
    write(tmp_path / "d/east.jsonl", rows(30, "q", "a"))
    write(tmp_path / "d/north.jsonl", rows(30, "prompt", "response", 7))
    call = ("init", tmp_path / "d", "--force", "--base", small.base, "--out", tmp_path / "c.yaml")
    said = llm_fed(*call)
    assert said.code == 0, said.err
    write(tmp_path / "d/west.jsonl", rows(30, "frage", "antwort", 3))
    llm_fed(*call).assert_refused("west.jsonl", "frage, antwort", "give --prompt COLUMN")
    llm_fed(*call, "--prompt", "frage", "--answer", "antwort").assert_refused("east.jsonl", "--prompt 'frage' is not")
    (tmp_path / "d/west.jsonl").unlink()  # what is left has usual names, but a slip is no name of any
    llm_fed(*call, "--prompt", "fraeg").assert_refused("--prompt 'fraeg' is not a column")


def test_chinese_columns_and_text(small, llm_fed, tmp_path):
    for name in ("北", "南"):
        texts = [{"问题": f"第{i}个问题是什么？", "回答": f"这是第{i}个回答，内容各不相同。{name}"} for i in range(30)]
        write(tmp_path / f"诊所/{name}.jsonl", texts)
    said = llm_fed("init", tmp_path / "诊所", "--base", small.base, "--out", tmp_path / "c.yaml")
    assert said.code == 0, said.err
    assert "prompt = 问题, answer = 回答" in said.out and "free text" in said.out
    config = configfile.load(tmp_path / "c.yaml")
    assert config.task.columns == ColumnsConfig() and config.eval.metric is None
    again = llm_fed(
        "init", tmp_path / "诊所", "--base", small.base, "--method", "fedmerge", "--out", tmp_path / "m.yaml"
    )
    assert again.code == 0 and configfile.load(tmp_path / "m.yaml").method["num_models"] == 2


def test_what_is_there_twice(small, llm_fed, tmp_path):
    seen, other = {"prompt": "w20  W21", "output": "w1"}, {"prompt": "w33 w34", "output": "w1"}
    write(tmp_path / "d/a/train.jsonl", [*rows(20, "prompt", "output"), seen, seen])
    write(tmp_path / "d/a/test.jsonl", [{"prompt": "w20 w21 ", "output": "w2"}, other])
    write(tmp_path / "d/b/train.jsonl", [*rows(20, "prompt", "output"), other])
    write(tmp_path / "d/b/test.jsonl", [{"prompt": "w40 w41", "output": "w1"}])
    said = llm_fed("init", tmp_path / "d", "--base", small.base, "--out", tmp_path / "c.yaml")
    assert "training examples that occur twice at the same client: 1" in said.out
    assert "test prompts that also occur in the same client's training examples: 1" in said.out
    assert "test prompts that also occur in another client's training examples: 1" in said.out
    plain = tmp_path / "plain"
    write(plain / "a.jsonl", rows(20, "prompt", "output"))
    write(plain / "b.jsonl", rows(20, "prompt", "output", 400))
    assert "warning" not in llm_fed("init", plain, "--base", small.base, "--out", tmp_path / "p.yaml").out


def test_one_file_with_a_client_column_or_without(small, llm_fed, tmp_path):
    path = tmp_path / "all.jsonl"
    write(path, [{**row, "hospital": f"h{i % 3}"} for i, row in enumerate(rows(60, "text", "label"))])
    asked = ("init", path, "--base", small.base, "--out", tmp_path / "c.yaml", "--force")
    assert "3: h0, h1, h2" in llm_fed(*asked).out
    assert configfile.load(tmp_path / "c.yaml").task.columns.client == "hospital"
    said = llm_fed(*asked, "--clients", 4)
    assert said.out.startswith("clients    4: ")
    assert configfile.load(tmp_path / "c.yaml").task.partition.clients == 4
    write(path, rows(60, "text", "label"))
    llm_fed(*asked).assert_refused("no column names the clients", "--client COLUMN, or --clients N")
    llm_fed(*asked, "--client", "txt").assert_refused("'txt' is not a column (the closest is 'text')")


def test_columns_that_nobody_could_guess(small, llm_fed, tmp_path):
    write(tmp_path / "d/a.jsonl", rows(30, "x1", "x2"))
    asked = ("init", tmp_path / "d", "--base", small.base, "--out", tmp_path / "c.yaml")
    llm_fed(*asked).assert_refused("no column for the prompt among x1, x2", "give --prompt COLUMN")
    assert llm_fed(*asked, "--prompt", "x1", "--answer", "x2").code == 0


def test_long_examples_and_few(small, llm_fed, tmp_path):
    data = rows(300, "prompt", "output")
    data[7]["prompt"] = " ".join(["w3"] * 200)
    write(tmp_path / "d/a.jsonl", data)
    write(tmp_path / "d/b.jsonl", rows(5, "prompt", "output"))
    said = llm_fed("init", tmp_path / "d", "--base", small.base, "--out", tmp_path / "c.yaml")
    assert "1 of 305 examples are longer than task.max_length=32 and will be skipped" in said.out
    assert "b (3) has fewer than 10 training examples: too few" in said.out


def test_a_base_that_cannot_be_read_here(llm_fed, tmp_path, monkeypatch):
    """What the base would have said is left out of the file, and the user is told."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment on import
    write(tmp_path / "d/a.jsonl", rows(30, "prompt", "output"))
    said = llm_fed("init", tmp_path / "d", "--base", "someone/something", "--out", tmp_path / "c.yaml")
    assert said.code == 0 and "someone/something cannot be loaded here" in said.out
    text = (tmp_path / "c.yaml").read_text()
    assert "max_length" not in text and "use chat for an instruction-tuned base" in text
    llm_fed("init", tmp_path / "d", "--base", "./nowhere", "--out", tmp_path / "e.yaml").assert_refused("not a folder")
    assert not (tmp_path / "e.yaml").exists()


def test_no_data(llm_fed, tmp_path):
    llm_fed("init", tmp_path / "nowhere", "--out", tmp_path / "c").assert_refused("no such file or folder")
    llm_fed("init", tmp_path, "--out", tmp_path / "c").assert_refused("no file of examples")
    (tmp_path / "trees.npz").touch()
    llm_fed("init", tmp_path, "--out", tmp_path / "c").assert_refused("holds pictures; docs/init.md has")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first example imports much
@given(st.text(min_size=1), st.dictionaries(st.sampled_from(["prompt", "answer", "input"]), st.text(min_size=1)))
def test_any_path_and_column_survive_the_yaml(path, columns):
    work = init.Workload.of([9, 9], init.PASSES, init.BATCH)
    draft = init.composed(
        init.UserChoices(path, method="fedlora"), TaskData("files", "rouge1", {}), work, known_base.SLOW, {}, [],
        task="files", base=path, known=True, columns=columns, dealt=None, skipped=0, template="plain", why="",
        max_length=0, too_long=False, about_eval="",
    )  # fmt: skip
    tree = documents.load(draft.text)
    assert (tree["task"]["path"], tree["base"]["name"]) == (path, path)
    assert tree["task"].get("columns", {}) == columns


def test_labels_are_few_and_short():
    def asked(*answers: str) -> list[Example]:
        return [Example("p", (answer,)) for answer in answers]

    assert survey.are_labels(asked(*["yes", "no"] * 5))
    assert not survey.are_labels(asked("yes", "no", "yes"))
    assert not survey.are_labels(asked(*["a long sentence that nobody would call a label at all"] * 9))
    assert not survey.are_labels(asked(*map(str, range(90))))


@pytest.mark.parametrize(("clients", "each"), [(1, 5000), (3000, 3)])
def test_of_many_examples_a_sample_is_measured(clients, each):
    own = tuple(Example("p", ("a",)) for _ in range(each))
    data = TaskData("files", "", {str(id): ClientData(str(id), own) for id in range(clients)})
    measured = sum(map(len, survey.samples(data).values()))
    assert survey.SAMPLE / 2 < measured <= survey.SAMPLE
