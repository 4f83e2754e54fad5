"""Partitions of examples into clients: disjoint, complete, seeded, refused where there is too little data."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from llm_fed.config import PartitionConfig, TaskConfig
from llm_fed.errors import UserError
from llm_fed.tasks.common import ClientData, Example
from llm_fed.tasks.partition import kept, partition


def make(client: str, train: int, test: int, validation: int = 0) -> ClientData:
    def examples(split: str, count: int) -> tuple[Example, ...]:
        return tuple(Example(f"{client} {split} {i}", ("yes",), group=client) for i in range(count))

    return ClientData(client, examples("train", train), examples("validation", validation), examples("test", test))


def cohort(*clients: ClientData) -> dict[str, ClientData]:
    return {client.client: client for client in clients}


def prompts(clients: dict[str, ClientData], split: str) -> list[str]:
    return [example.prompt for client in clients.values() for example in getattr(client, split)]


SOURCE = cohort(make("snli", 40, 20, 10), make("wic", 60, 30, 10), make("cola", 50, 25, 10))


def test_natural_keeps_clients_as_they_are():
    assert partition(SOURCE, PartitionConfig(), 0) == SOURCE


@pytest.mark.parametrize("kind, clients, made", [("split", 3, 9), ("iid", 7, 7), ("dirichlet", 5, 5)])
def test_every_example_goes_to_one_client_and_stays_in_its_split(kind, clients, made):
    parts = partition(SOURCE, PartitionConfig(kind=kind, clients=clients), 0)
    assert len(parts) == made
    assert [client.client for client in parts.values()] == list(parts)
    for split in ("train", "validation", "test"):
        assert sorted(prompts(parts, split)) == sorted(prompts(SOURCE, split))
    assert all(client.train and client.test for client in parts.values())


@pytest.mark.parametrize("kind", ["split", "iid", "dirichlet"])
def test_partition_follows_the_seed(kind):
    config = PartitionConfig(kind=kind, clients=4)
    first = partition(SOURCE, config, 0)
    assert partition(SOURCE, config, 0) == first
    assert prompts(partition(SOURCE, config, 1), "train") != prompts(first, "train")


def test_split_keeps_natural_clients_apart_and_shares_equal():
    parts = partition(SOURCE, PartitionConfig(kind="split", clients=2), 0)
    assert list(parts) == ["snli-0", "snli-1", "wic-0", "wic-1", "cola-0", "cola-1"]
    assert [len(client.train) for client in parts.values()] == [20, 20, 30, 30, 25, 25]
    assert [len(client.test) for client in parts.values()] == [10, 10, 15, 15, 13, 12]
    for name, client in parts.items():
        assert {example.group for example in client.train + client.test} == {name.split("-")[0]}


def test_iid_mixes_the_natural_clients_in_equal_shares():
    parts = partition(SOURCE, PartitionConfig(kind="iid", clients=10), 0)
    assert list(parts)[:2] == ["client0", "client1"]
    assert {len(client.train) for client in parts.values()} == {15}
    assert all(len({example.group for example in client.train}) == 3 for client in parts.values())


def test_dirichlet_tests_a_client_on_the_mixture_that_it_trains_on():
    source = cohort(*(make(name, 200, 100) for name in ("a", "b", "c", "d")))
    parts = partition(source, PartitionConfig(kind="dirichlet", clients=5, alpha=0.3), 0)
    for client in parts.values():
        train = Counter(example.group for example in client.train)
        test = Counter(example.group for example in client.test)
        assert all(abs(train[label] / 2 - test[label]) <= 1.5 for label in source)


def test_dirichlet_concentration_sets_how_uneven_labels_are():
    source = cohort(*(make(name, 300, 30) for name in "abcdef"))

    def largest_share(alpha: float) -> float:
        parts = partition(source, PartitionConfig(kind="dirichlet", clients=4, alpha=alpha), 0)
        counts = [Counter(example.group for example in client.train) for client in parts.values()]
        return sum(max(count.values()) / sum(count.values()) for count in counts) / len(counts)

    assert largest_share(0.1) > 0.4
    assert largest_share(1000.0) < 0.2  # 1/6 for even shares


def test_dirichlet_draws_again_until_every_client_can_train_and_be_tested():
    source = cohort(make("a", 12, 12), make("b", 12, 12))
    for seed in range(10):
        parts = partition(source, PartitionConfig(kind="dirichlet", clients=4, alpha=0.5), seed)
        assert all(client.train and client.test for client in parts.values())


def test_without_a_test_split_every_client_gets_two_training_examples():
    source = cohort(make("a", 6, 0), make("b", 6, 0))
    for kind in ("iid", "dirichlet"):
        parts = partition(source, PartitionConfig(kind=kind, clients=4, alpha=1.0), 0)
        assert all(len(client.train) >= 2 for client in parts.values())


@pytest.mark.parametrize(
    "config, message",
    [
        (
            PartitionConfig(kind="split", clients=30),
            "30, but client 'snli' has 40 train, 10 validation, 20 test .* for 10; lower",
        ),
        (PartitionConfig(kind="iid", clients=151), "151, but the data has 150 train, .* for 30; lower"),
        (PartitionConfig(kind="dirichlet", clients=151), "151 clients .*150 train, 75 test, 3 labels.*lower"),
        (
            PartitionConfig(kind="dirichlet", clients=9, alpha=1e-4),
            "=9 clients .* raise task.partition.alpha=0.0001",
        ),
        (PartitionConfig(kind="iid"), "task.partition.clients=None; kind=iid needs at least 1"),
        (PartitionConfig(kind="split", clients=0), "task.partition.clients=0; kind=split needs at least 1"),
        (PartitionConfig(kind="dirichlet", clients=2, alpha=0.0), "alpha=0.0: .* above 0"),
        (
            PartitionConfig(kind="dirichlett", clients=2),
            "kind='dirichlett' is unknown .the closest is 'dirichlet'",
        ),
    ],
)
def test_impossible_partitions_say_numbers_and_remedy(config, message):
    with pytest.raises(UserError, match=message):
        partition(SOURCE, config, 0)


def test_iid_without_a_test_split_needs_two_examples_per_client():
    with pytest.raises(UserError, match="=4, but the data has 7 train examples, enough for 3; lower"):
        partition(cohort(make("a", 7, 0)), PartitionConfig(kind="iid", clients=4), 0)


def test_dirichlet_needs_two_labels():
    with pytest.raises(UserError, match=r"two labels or more, got \['snli'\]; .* task.partition.label"):
        partition(cohort(make("snli", 9, 9)), PartitionConfig(kind="dirichlet", clients=2), 0)


@pytest.mark.parametrize("kind, clients", [("split", 3), ("iid", 7), ("dirichlet", 5)])
def test_partitions_stay_those_of_earlier_versions(kind, clients):
    """Digests of the clients that flwr-datasets' IidPartitioner and DirichletPartitioner gave for seed 0."""
    parts = partition(SOURCE, PartitionConfig(kind=kind, clients=clients), 0)
    digest = hashlib.sha256("\n".join(prompts(parts, "train") + prompts(parts, "test")).encode()).hexdigest()[:16]
    assert digest == {"split": "2d5420ef6cd08ad4", "iid": "d284c239f04d4b17", "dirichlet": "c72389ad7ce277b8"}[kind]


def test_clients_that_are_not_tested_need_no_test_examples():
    source = cohort(make("a", 30, 0), make("b", 30, 0))
    assert len(partition(source, PartitionConfig(kind="iid", clients=60), 0, tested=False)) == 60
    with pytest.raises(UserError, match="enough for 30"):
        partition(source, PartitionConfig(kind="iid", clients=60), 0)
    parts = partition(source, PartitionConfig(kind="dirichlet", clients=50, alpha=0.1), 0, tested=False)
    assert sorted(prompts(parts, "train")) == sorted(prompts(source, "train"))
    assert len(parts) == 50 and any(not client.train for client in parts.values())


def test_kept_clients_are_the_first_or_a_seeded_sample_in_their_order():
    names = [f"c{i}" for i in range(30)]
    assert kept(names, TaskConfig(), 0) == names
    assert kept(names, TaskConfig(clients=3), 0) == names[:3]
    sample = kept(names, TaskConfig(clients=10, sample_clients=True), 0)
    assert sample == sorted(set(sample), key=names.index) and len(sample) == 10 and sample != names[:10]
    assert sample == kept(names, TaskConfig(clients=10, sample_clients=True), 0)
    assert sample != kept(names, TaskConfig(clients=10, sample_clients=True), 1)
    assert kept(sample, TaskConfig(clients=10, sample_clients=True), 5) == sample  # loaders may choose beforehand
    with pytest.raises(UserError, match="task.clients=31, but the data has 30 clients"):
        kept(names, TaskConfig(clients=31, sample_clients=True), 0)
