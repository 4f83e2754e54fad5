"""Partitions of examples into clients: disjoint, complete, seeded, refused where there is too little data."""

import dataclasses
import hashlib
from collections import Counter

import pytest

from llm_fed.basics.errors import UserError
from llm_fed.settings.config import PartitionConfig, TaskConfig
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


def held(client: ClientData, *splits: str) -> Counter[str]:
    return Counter(example.group for split in splits for example in getattr(client, split))


SPLITS = ("train", "validation", "test")
SOURCE = cohort(make("snli", 40, 20, 10), make("wic", 60, 30, 10), make("cola", 50, 25, 10))
TEN = cohort(*(make(str(label), 100, 20) for label in range(10)))  # labels 0 to 9
MADE = [
    (PartitionConfig(kind="split", clients=3), 9),
    (PartitionConfig(kind="iid", clients=7), 7),
    (PartitionConfig(kind="dirichlet", clients=5), 5),
    (PartitionConfig(kind="pathological", clients=5, classes=2), 5),
    (PartitionConfig(kind="cluster", sizes=(4, 2)), 6),
]


def test_natural_keeps_clients_as_they_are():
    assert partition(SOURCE, PartitionConfig(), 0) == SOURCE


@pytest.mark.parametrize("config, made", MADE, ids=lambda value: getattr(value, "kind", None))
def test_every_example_goes_to_one_client_and_stays_in_its_split(config, made):
    parts = partition(SOURCE, config, 0)
    assert len(parts) == made
    assert [client.client for client in parts.values()] == list(parts)
    for split in SPLITS:
        assert sorted(prompts(parts, split)) == sorted(prompts(SOURCE, split))
    assert all(client.train and client.test for client in parts.values())


@pytest.mark.parametrize("config, made", MADE, ids=lambda value: getattr(value, "kind", None))
def test_partition_follows_the_seed(config, made):
    first = partition(SOURCE, config, 0)
    assert partition(SOURCE, config, 0) == first
    other = partition(SOURCE, config, 1)
    assert prompts(other, "train") != prompts(first, "train")
    shares_are_drawn = config.kind in ("dirichlet", "pathological")
    if shares_are_drawn:
        assert [held(client, "train") for client in first.values()] != [held(c, "train") for c in other.values()]


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


def assert_balanced(loads: list[int]) -> None:
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("clients, per_client", [(5, 2), (10, 2), (7, 3), (13, 4), (4, 10)])
def test_pathological_gives_each_client_so_many_labels_and_each_label_as_many_clients(clients, per_client):
    for seed in range(5):
        parts = partition(TEN, PartitionConfig(kind="pathological", clients=clients, classes=per_client), seed)
        assert [len(held(client, *SPLITS)) for client in parts.values()] == [per_client] * clients
        loads = Counter(label for client in parts.values() for label in held(client, *SPLITS))
        assert set(loads) == set(TEN)
        assert_balanced(list(loads.values()))


def test_cluster_cuts_the_labels_in_natural_order_and_deals_each_block_out_evenly():
    source = cohort(*(make(str(label), 31, 13, 7) for label in (10, 9, 2, 1, 0)))
    parts = partition(source, PartitionConfig(kind="cluster", sizes=(2, 3)), 0)
    assert list(parts) == [
        "cluster0-client0", "cluster0-client1", "cluster1-client2", "cluster1-client3", "cluster1-client4"
    ]  # fmt: skip
    for prefix, labels in (("cluster0", {"0", "1", "2"}), ("cluster1", {"9", "10"})):
        members = [client for name, client in parts.items() if name.startswith(prefix)]
        assert all(set(held(client, split)) == labels for client in members for split in SPLITS)
        for split in SPLITS:
            assert_balanced([len(getattr(client, split)) for client in members])
            for label in labels:
                assert_balanced([held(client, split)[label] for client in members])


@pytest.mark.parametrize(
    "config, made", [*MADE, (PartitionConfig(), 3)], ids=lambda value: getattr(value, "kind", None)
)
def test_by_content_a_row_is_tested_whoever_gets_it(config, made):
    parts = partition(SOURCE, dataclasses.replace(config, test=0.2), 0)
    assert len(parts) == made
    pool = sorted(prompts(SOURCE, "train") + prompts(SOURCE, "test"))
    assert sorted(prompts(parts, "train") + prompts(parts, "test")) == pool
    natural = partition(SOURCE, PartitionConfig(test=0.2), 0)
    forced = {*prompts(parts, "test")} ^ {*prompts(natural, "test")}  # where a client would lack one of the sides
    assert len(forced) <= (made if config.kind == "dirichlet" else 0)
    assert 0.1 < len(prompts(parts, "test")) / len(pool) < 0.3


IMPOSSIBLE = [
    ({"kind": "split", "clients": 30}, "30, but client 'snli' has 40 train, 10 validation, 20 test .* for 10; lower"),
    ({"kind": "iid", "clients": 151}, "151, but the data has 150 train, .* for 30; lower"),
    ({"kind": "iid"}, "task.partition.clients=None; kind=iid needs at least 1"),
    ({"kind": "iid", "clients": 2, "sizes": (1, 1)}, r"sizes=\(1, 1\) with kind=iid: .* no other"),
    ({"kind": "dirichlet", "clients": 9, "alpha": 1e-4}, "=9 clients .* raise task.partition.alpha=0.0001"),
    ({"kind": "dirichlet", "clients": 2, "alpha": 0.0}, "alpha is 0.0; .* above 0"),
    ({"kind": "dirichlett", "clients": 2}, "kind='dirichlett' is unknown .the closest is 'dirichlet'"),
    ({"kind": "pathological", "clients": 2}, "classes=None with kind=pathological: .* needs a value"),
    ({"kind": "pathological", "clients": 2, "classes": 4}, "classes=4, but .* 3 labels; .* from 1 to 3"),
    ({"kind": "pathological", "clients": 2, "classes": 1}, "gives 2 places for 3 labels, .*; raise"),
    ({"kind": "pathological", "clients": 90, "classes": 3}, "label 'cola' to 90 clients, but it has 85 examples"),
    ({"kind": "cluster", "sizes": (2, 1), "clients": 4}, "clients=4, but .*sizes has 3; leave clients out"),
    ({"kind": "cluster", "sizes": (1, 1, 1, 1)}, "4 clusters, but the examples have 3 labels; .* fewer"),
    ({"kind": "cluster", "sizes": (60, 20)}, r"sizes=\(60, 20\) clients .*; lower task.partition.sizes$"),
]  # fmt: skip


@pytest.mark.parametrize("config, message", IMPOSSIBLE)
def test_impossible_partitions_say_numbers_and_remedy(config, message):
    with pytest.raises(UserError, match=message):
        partition(SOURCE, PartitionConfig(**config), 0)


def test_iid_with_a_share_for_tests_needs_two_examples_per_client_of_whatever_split():
    source, config = cohort(make("a", 2, 6)), PartitionConfig(kind="iid", clients=4, test=0.2)
    assert [len(c.train) + len(c.test) for c in partition(source, config, 0).values()] == [2] * 4
    with pytest.raises(UserError, match="=5, but the data has 8 train examples, enough for 4; lower"):
        partition(source, dataclasses.replace(config, clients=5), 0)


@pytest.mark.parametrize("config", [config for config, _ in MADE[2:]], ids=lambda config: config.kind)
def test_partitions_by_label_need_two_labels(config):
    with pytest.raises(
        UserError, match=rf"{config.kind} needs .* two labels or more, got \['snli'\]; .*partition.label"
    ):
        partition(cohort(make("snli", 9, 9)), config, 0)


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
