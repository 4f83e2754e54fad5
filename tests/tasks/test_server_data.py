"""The server's own data: drawn from the test split, or another task's; the test set of one model for all."""

import json
from pathlib import Path

import numpy as np
import pytest

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import PartitionConfig, ServerConfig, TaskConfig
from llm_fed.tasks.common import ClientData, Example
from llm_fed.tasks.splits import ByContent, in_domain

SIZES = {"wic": (30, 20), "cola": (40, 12), "snli": (50, 15)}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three clients of text with 120 training and 47 test examples."""
    for client, counts in SIZES.items():
        (tmp_path / "text" / client).mkdir(parents=True)
        for split, count in zip(("train", "test"), counts, strict=True):
            lines = [json.dumps({"prompt": f"{client} {split} {i}", "answer": "yes"}) for i in range(count)]
            (tmp_path / "text" / client / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path / "text"


@pytest.fixture
def pictures(tmp_path) -> Path:
    """100 training and 50 test pictures of ten classes; the pixels of a picture tell it from all others."""
    pixels = np.arange(150, dtype=np.uint8).repeat(9).reshape(150, 3, 3)
    labels = np.arange(150) % 10
    path = tmp_path / "pictures.npz"
    np.savez(path, x_train=pixels[:100], y_train=labels[:100], x_test=pixels[100:], y_test=labels[100:])
    return path


def load(path: Path, seed: int = 0, name: str = "files", **settings) -> tasks.TaskData:
    server = ServerConfig(**settings.pop("server"))
    settings.setdefault("validation", 0.0)
    return tasks.load(TaskConfig(name=name, path=str(path), server=server, **settings), seed)


def ids(examples) -> list:
    return [e.prompt if isinstance(e, Example) else int(e.pixels[0, 0, 0]) for e in examples]


def pooled(clients: dict[str, ClientData], split: str) -> list:
    return [each for client in clients.values() for each in ids(getattr(client, split))]


def own(data: tasks.TaskData) -> ClientData:
    assert data.server is not None
    return data.server


def test_examples_leave_the_test_split_of_the_clients(folder):
    everything = pooled(load(folder, server={}).clients, "test")
    data = load(folder, server={"examples": 20})
    taken, left = ids(own(data).train), pooled(data.clients, "test")
    assert len(set(taken)) == 20 and not set(taken) & set(left) and sorted(taken + left) == sorted(everything)
    assert own(data).test == () and own(data).client == "server"
    assert pooled(data.clients, "train") == pooled(load(folder, server={}).clients, "train")


def test_the_draw_is_uniform_and_follows_the_seed(folder):
    draws = [ids(own(load(folder, seed, server={"examples": 20})).train) for seed in range(30)]
    assert draws[0] == ids(own(load(folder, 0, server={"examples": 20})).train) != draws[1]
    shares = [sum(each.startswith("wic") for each in draw) / 20 for draw in draws]
    assert np.mean(shares) == pytest.approx(20 / 47, abs=0.06)


def test_each_takes_so_many_of_each_natural_client(folder):
    data = load(folder, server={"examples": 10, "each": True}, partition=PartitionConfig(kind="split", clients=2))
    assert [sum(e.startswith(name) for e in ids(own(data).train)) for name in SIZES] == [10, 10, 10]
    assert {name: len(client.test) for name, client in data.clients.items()} == {
        "cola-0": 1, "cola-1": 1, "snli-0": 3, "snli-1": 2, "wic-0": 5, "wic-1": 5,
    }  # fmt: skip


def test_what_equals_an_example_of_the_server_is_not_tested():
    same = tuple(Example(f"question {i}", ("yes",)) for i in range(20))
    clients = {name: ClientData(name, (), test=same) for name in ("a", "b")}
    left, found = in_domain(clients, ServerConfig(examples=4), 0, ByContent(0))
    assert len(found.train) == 4 and len(set(found.train)) == 2  # with both copies
    assert not {*found.train} & {*left["a"].test, *left["b"].test}


def test_what_is_left_is_the_test_set_of_one_model(pictures):
    settings = {"name": "fashion-mnist", "partition": PartitionConfig(kind="iid", clients=80)}
    data = load(pictures, server={"examples": 20, "test": True}, **settings)
    assert len(own(data).train) == 20
    assert sorted(ids(own(data).train + own(data).test)) == list(range(100, 150))
    assert len(data.clients) == 80 and not any(client.test for client in data.clients.values())
    assert sorted(pooled(data.clients, "train")) == list(range(100))
    whole = own(load(pictures, server={"test": True}, **settings))
    assert whole.train == () and ids(whole.test) == list(range(100, 150))


def test_clients_without_a_training_example_are_left_out(pictures):
    partition = PartitionConfig(kind="dirichlet", clients=60, alpha=0.1)
    data = load(pictures, server={"examples": 20, "test": True}, name="fashion-mnist", partition=partition)
    assert len(data.everybody) == 60 and data.everybody[0] == "client00"
    assert 10 < len(data.clients) < 60 and sorted(pooled(data.clients, "train")) == list(range(100))
    with pytest.raises(UserError, match="no dirichlet partition found .*=60 clients"):
        load(pictures, server={"examples": 20}, name="fashion-mnist", partition=partition)


def test_without_a_test_split_one_is_held_out_first(folder, caplog):
    rows = [json.loads(line) for file in sorted(folder.rglob("train.jsonl")) for line in file.read_text().splitlines()]
    whole = folder.parent / "whole.jsonl"
    whole.write_text("\n".join(json.dumps(row | {"client": row["prompt"].split()[0]}) for row in rows))
    plain = load(whole, server={})
    data = load(whole, server={"examples": 4, "test": True})
    assert caplog.text.count("no test split") == 2
    assert pooled(data.clients, "train") == pooled(plain.clients, "train")
    assert sorted(ids(own(data).train + own(data).test)) == sorted(pooled(plain.clients, "test"))


def test_another_task_brings_its_training_examples_and_labels(pictures, tmp_path):
    other = tmp_path / "other.npz"
    colours = np.arange(200, 230, dtype=np.uint8).repeat(48).reshape(30, 4, 4, 3)
    np.savez(other, x_train=colours, y_train=np.arange(30) % 10, x_test=colours[:5], y_test=np.arange(5))
    server = {"name": "cifar10", "path": str(other), "examples": 12, "test": True}
    data = load(pictures, server=server, name="fashion-mnist")
    assert len(set(ids(own(data).train))) == 12 and set(ids(own(data).train)) <= set(range(200, 230))
    assert ids(own(load(pictures, 1, server=server, name="fashion-mnist")).train) != ids(own(data).train)
    assert own(data).train[0].pixels.shape == (3, 4, 4) and data.clients["all"].train[0].pixels.shape == (1, 3, 3)
    assert data.server_labels == tasks.images.CIFAR10 and data.labels == tasks.images.FASHION
    assert ids(own(data).test) == list(range(100, 150))
    assert len(own(load(pictures, server=server | {"examples": None}, name="fashion-mnist")).train) == 30
    beside = load(pictures, server=server | {"test": False}, name="fashion-mnist")
    assert len(beside.clients["all"].test) == 50 and own(beside).test == ()
    sized = load(pictures, server=server, name="fashion-mnist", image_size=5)
    assert own(sized).train[0].pixels.shape == (3, 5, 5) and sized.clients["all"].train[0].pixels.shape == (1, 5, 5)


def test_another_task_of_text(folder):
    data = load(folder, server={"name": "planted", "examples": 7})
    assert len(own(data).train) == 7 and all("zoo" not in each and each not in SIZES for each in ids(own(data).train))
    assert len(pooled(data.clients, "test")) == 47 and data.server_labels == ()
    assert len(own(load(folder, server={"name": "planted", "examples": None})).train) == 12 * 16


def test_noise_leaves_the_server_clean(pictures):
    clean = load(pictures, server={"examples": 20, "test": True}, name="fashion-mnist")
    noisy = load(pictures, server={"examples": 20, "test": True}, name="fashion-mnist", noise=1.0)
    for split in ("train", "test"):
        assert [p.label for p in getattr(own(noisy), split)] == [p.label for p in getattr(own(clean), split)]
    assert [p.label for p in noisy.clients["all"].train] != [p.label for p in clean.clients["all"].train]


@pytest.mark.parametrize(
    "server, message",
    [
        ({"examples": 48}, "task.server.examples=48, but there are 47 to take from the task's test split; lower it"),
        ({"examples": 13, "each": True}, "=13, but there are 12 to take from client 'cola'; lower it"),
        ({"examples": 47, "test": True}, "task.server.examples=47 leaves no test example"),
        ({"examples": 193, "name": "planted"}, "=193, but there are 192 to take from the training split of"),
        ({"examples": 1, "name": "cifar100"}, "task.server.name=cifar100: text, images and labelled texts do not mix"),
        ({"examples": 1, "name": "plantet"}, "task.server.name='plantet' is unknown .the closest is 'planted'"),
    ],
)
def test_too_much_or_wrong_server_data_is_refused(folder, server, message):
    with pytest.raises(UserError, match=message):
        load(folder, server=server)
