"""The task `rolebench`: roles as clients, half of each, several reference answers."""

import pytest
from datasets import Dataset, DatasetDict
from jsonl import write

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.scoring.scores import score
from llm_fed.settings.config import TaskConfig

ROLES = [f"Captain {name}" for name in "ABCDEFGH"]


def records(split: str, count: int, **more: object) -> list[dict]:
    return [
        {"role": role, "question": f"{role} {split} {i}?", "generated": ["aye", f"no {i}"], **more}
        for role in ROLES
        for i in range(count)
    ]


@pytest.fixture
def folder(tmp_path):
    general = [{"role": ROLES[0], "question": "Add 2 and 2", "generated": ["4"], "kind": "general"}]
    write(tmp_path / "train.jsonl.gz", records("train", 9, kind="role_specific") + general)
    write(tmp_path / "test.jsonl.gz", records("test", 4, kind="role_specific"))
    return tmp_path


def load(path, seed=0, **settings):
    return tasks.load(TaskConfig(name="rolebench", path=str(path), validation=0.0, **settings), seed)


def test_a_client_has_half_of_its_roles_questions(folder):
    data = load(folder)
    assert data.metric == "rougeL" and sorted(data.clients) == ROLES
    assert {(len(c.train), len(c.test)) for c in data.clients.values()} == {(5, 2)}
    for role, client in data.clients.items():
        assert all(example.prompt.startswith(f"{role} train") for example in client.train)  # none of kind general
        assert all(example.prompt.startswith(f"{role} test") for example in client.test)
        assert client.test[0].answers[0] == "aye" and client.test[0].answers[1].startswith("no ")
    assert load(folder) == data
    other = load(folder, seed=1)
    assert any(other.clients[role].train != data.clients[role].train for role in ROLES)


def test_the_first_so_many_clients_are_a_random_sample_of_the_roles(folder):
    samples = [tuple(load(folder, seed, clients=3).clients) for seed in range(4)]
    assert len(set(samples)) > 1 and samples[0] == tuple(load(folder).clients)[:3]
    assert list(load(folder, groups=(ROLES[4], ROLES[1])).clients) == [ROLES[4], ROLES[1]]
    with pytest.raises(UserError, match="task.groups='Captain Bee' is unknown .the closest is 'Captain B'"):
        load(folder, groups=("Captain Bee",))


def test_both_splits_are_needed(folder):
    (folder / "test.jsonl.gz").unlink()
    with pytest.raises(UserError, match="lacks a train or a test file; rolebench needs both"):
        load(folder)
    with pytest.raises(UserError, match="there is no such file or folder"):
        load(folder / "nowhere")


def test_all_hundred_roles_have_chinese_ones_among_them(monkeypatch, tmp_path):
    """From the Hub both languages' files, from a folder the roles that are there; each character counts as a word."""
    chinese = [{"role": "李白", "question": f"何处 {i}?", "generated": ["床前明月光"]} for i in range(8)]

    def load_dataset(name, data_files):
        assert data_files["train"] == [
            "rolebench-eng/instruction-generalization/role_specific/train.jsonl",
            "rolebench-zh/role_specific/train.jsonl",
        ]
        return DatasetDict({split: Dataset.from_list(records(split, 4) + chinese) for split in data_files})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    of_hub = tasks.load(TaskConfig(name="rolebench-100", validation=0.0), 0)
    assert sorted(of_hub.clients) == [*ROLES, "李白"] and of_hub.name == "rolebench-100"
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", records(split, 4) + chinese)
    of_folder = tasks.load(TaskConfig(name="rolebench-100", path=str(tmp_path), validation=0.0), 0)
    assert of_folder.clients["李白"].train == of_hub.clients["李白"].train
    assert score("rougeL", ["床前光"], [("床前明月光",)]) == pytest.approx(75)  # 3 of 3 and 3 of 5
