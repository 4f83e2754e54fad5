"""Paths of data: of this machine alone, unless hf:// says that a data set is the Hub's."""

import random
import string

import pytest
import yaml
from datasets import Dataset, DatasetDict

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.export.card import model_card
from llm_fed.kinds.wording import Model
from llm_fed.settings.config import ServerConfig, TaskConfig


@pytest.fixture
def offline(monkeypatch):
    """Asking the Hub for anything fails the test."""

    def asked(name, **options):
        pytest.fail(f"the Hub was asked for {name!r}")

    monkeypatch.setattr("datasets.load_dataset", asked)


def slips(path: str) -> set[str]:
    """Texts that are a letter away from a path, and the path written in other ways."""
    draw = random.Random(0)
    found = {f"./{path}", f"{path}/", f"~/{path}", f"~nobody/{path}", path.upper(), f" {path}", f"{path}\0", "", "a/b"}
    for i in range(len(path)):
        letter = draw.choice(string.ascii_letters + "._-/ ")
        found |= {path[:i] + path[i + 1 :], path[:i] + letter + path[i:], path[:i] + letter + path[i + 1 :]}
    return found | {"x" * 5000, f"{path}/{'y' * 300}"}


@pytest.mark.parametrize("task", ["files", "flan", "rolebench", "commonsense", "xnli", "images", "cifar10"])
def test_a_mistyped_path_is_never_asked_of_the_hub(tmp_path, monkeypatch, offline, task):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in slips("data/clinics"):
        with pytest.raises(UserError):
            tasks.load(TaskConfig(name=task, path=path), 0)
        server = ServerConfig(name=task, path=path, examples=1)
        with pytest.raises(UserError, match="task.server.path"):
            tasks.load(TaskConfig(name="planted", server=server), 0)


def test_the_error_says_where_it_looked(tmp_path, monkeypatch, offline):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        tasks.load(TaskConfig(name="files", path="data/clinic"), 0)
    assert str(caught.value) == (
        f"task.path='data/clinic': there is no such file or folder (looked for {tmp_path}/data/clinic). A Hub "
        "data set is written hf://owner/name."
    )


def test_hf_names_a_data_set_of_the_hub(tmp_path, monkeypatch):
    """Also where a folder of the same name lies here."""
    asked = []

    def load_dataset(name, **options):
        asked.append(name)
        rows = Dataset.from_list([{"client": c, "prompt": "?", "answer": "!"} for c in "aabb" * 2])
        return DatasetDict(train=rows, test=rows)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    assert list(tasks.load(TaskConfig(name="files", path="hf://some/thing"), 0).clients) == ["a", "b"]
    assert asked == ["some/thing"]
    for task in ("flan", "rolebench", "commonsense", "images", "cifar10"):
        with pytest.raises(UserError, match="only the task `files` and its like read a Hub data set by its id"):
            tasks.load(TaskConfig(name=task, path="hf://some/thing"), 0)
    for wrong in ("hf://thing", "hf://some/thing/more", "hf:///some", "hf://some/th ing", "hf://"):
        with pytest.raises(UserError, match="a Hub data set is written hf://owner/name"):
            tasks.load(TaskConfig(name="files", path=wrong), 0)
    assert asked == ["some/thing"]


def test_data_of_eval_is_local(small, llm_fed, finished, offline, tmp_path):
    adapter = ["eval", "--base", small.base, "--adapter", finished / "adapters/ada"]
    llm_fed(*adapter, "--data", small.data / "ada/tset.jsonl").assert_refused("--data", "no such file")
    llm_fed(*adapter, "--data", "hf://some/thing").assert_refused("--data", "is on the Hub")


@pytest.mark.parametrize(
    "path, dataset", [("hf://some/thing", "some/thing"), ("data/clinics", "files"), (None, "files")]
)
def test_a_card_names_the_hub_data_set(path, dataset):
    card = model_card(
        Model("a/b"), client="c", method="local", paper="-", metrics={"rouge1": 1.0},
        config=yaml.safe_dump({"task": {"name": "files", "path": path}}),
    )  # fmt: skip
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["model-index"][0]["results"][0]["dataset"]["type"] == dataset
