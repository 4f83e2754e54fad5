"""The image tasks on real data, in the folder that LLM_FED_DATA names."""

import os
from pathlib import Path

import pytest
import torch

from llm_fed import tasks
from llm_fed.settings.config import TaskConfig


def load(name: str, folder: str, **settings) -> tasks.TaskData:
    path = Path(os.environ["LLM_FED_DATA"]) / folder
    return tasks.load(TaskConfig(name=name, path=str(path), validation=0.0, **settings), 0)


@pytest.mark.skipif("LLM_FED_DATA" not in os.environ, reason="LLM_FED_DATA names no folder with image data sets")
@pytest.mark.parametrize(
    "name, folder, clients, train, test, shape, labels",
    [
        pytest.param("fashion-mnist", "fashion_mnist", 1, 60_000, 10_000, (1, 28, 28), 10, marks=pytest.mark.slow),
        ("cifar10", "cifar10", 1, 10_000, 2_000, (3, 32, 32), 10),
        pytest.param("cifar100", "cifar100", 1, 10_000, 2_000, (3, 32, 32), 20, marks=pytest.mark.slow),
        ("cifar100-fine", "cifar100", 1, 10_000, 2_000, (3, 32, 32), 100),
        ("femnist", "femnist", 12, 4_804, 1_193, (1, 28, 28), 40),
        ("pacs", "pacs", 4, 8_493, 1_498, (3, 32, 32), 7),
        ("images", "mnist", 1, 10_000, 2_000, (1, 28, 28), 10),
    ],
)
def test_real_data(name, folder, clients, train, test, shape, labels):
    data = load(name, folder)
    assert (len(data.clients), len(data.labels)) == (clients, labels)
    assert sum(len(client.train) for client in data.clients.values()) == train
    assert sum(len(client.test) for client in data.clients.values()) == test
    assert {p.pixels.shape for client in data.clients.values() for p in client.test} == {torch.Size(shape)}
