"""Held-out splits by content: which rows are equal, that rows do not move each other, what a run remembers."""

import json
import logging
import unicodedata
from pathlib import Path

import growing
import numpy as np
import pytest
import torch

from llm_fed import tasks
from llm_fed.settings.config import PartitionConfig, ServerConfig, TaskConfig
from llm_fed.tasks import common
from llm_fed.tasks.common import ClientData, Example, Picture, TaskData, Turn
from llm_fed.tasks.record import SERVER, TEST, TRAINING, VALIDATION, Record, together
from llm_fed.tasks.splits import ByContent


def write(path: Path, rows: list[str] | range) -> Path:
    """A file of rows with these prompts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps({"prompt": f"question {row}", "answer": f"answer {row}"}) + "\n" for row in rows)
    )
    return path


def load(path: Path, known: Record | None = None, seed: int = 0, **settings) -> TaskData:
    return tasks.load(TaskConfig("files", str(path), **settings), seed, known=known)


def prompts(data: TaskData, split: str) -> dict[str, list[str]]:
    return {name: [example.prompt for example in getattr(client, split)] for name, client in data.clients.items()}


def rows(*texts: str) -> tuple[Example, ...]:
    return tuple(Example(text, ("yes",)) for text in texts)


def record_of(data: TaskData) -> Record:
    assert data.record is not None
    return data.record


# Which rows are equal


@pytest.mark.parametrize(
    "other",
    [
        Example("which  WARD\r\nin Zürich? ", ("Surgery.",), ("b", "A")),
        Example(unicodedata.normalize("NFD", "Which ward in Zürich?"), ("Surgery.",), ("a", "b"), "another group"),
        Example((Turn("user", "Which ward in Zürich?"),), ("Surgery.",), ("a", "b")),
    ],
    ids=["spelling", "normal form", "conversation"],
)
def test_rows_that_say_the_same_are_equal(other):
    assert other.digest == Example("Which ward in Zürich?", ("Surgery.",), ("a", "b")).digest


@pytest.mark.parametrize(
    "other",
    [
        Example("Which ward in Zürich", ("Surgery.",), ("a", "b")),
        Example("Which ward in Zürich?", ("Surgery", "."), ("a", "b")),
        Example("Which ward in Zürich?", ("Surgery.", "a"), ("b",)),
        Example((Turn("system", "Which ward in Zürich?"),), ("Surgery.",), ("a", "b")),
        Example((Turn("system", ""), Turn("user", "Which ward in Zürich?")), ("Surgery.",), ("a", "b")),
    ],
)
def test_others_are_not(other):
    assert other.digest != Example("Which ward in Zürich?", ("Surgery.",), ("a", "b")).digest


def test_digests_and_draws_stay_what_they_are():
    """Run folders hold digests, and rows move if either changes."""
    assert Example("Which ward?", ("Surgery.",)).digest == 3302664482097212900
    assert Example("half of a character: \ud83d", ("東京",), ("東京", "x")).digest == 645274702876928424
    assert Picture(torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2), 1, "1").digest == 9403330315103345332
    drawn = common.drawn(np.array([0, 1, 2**64 - 1], np.uint64), 7)
    assert drawn.tolist() == [1346066267577507604, 15093541023163888492, 9734176225339276983]


# Rows do not move each other


@pytest.mark.parametrize("split, share", [("test", 0.2), ("validation", 0.1)])
def test_a_row_that_is_added_removed_or_moved_changes_the_split_of_no_other(split, share):
    def held(*clients: tuple[Example, ...]) -> set[Example]:
        given = [ClientData(f"client {number}", own) for number, own in enumerate(clients)]
        return {row for client in ByContent(0).hold_out(given, split, share) for row in getattr(client, split)}

    many = rows(*map(str, range(200)))
    before = held(many)
    assert share / 2 < len(before) / 200 < 2 * share
    assert held(many[::-1]) == before == held(many[:100], many[100:])
    assert held(many[:-1]) == before - {many[-1]}
    more = held((*rows("a", "b", "c", "d", "e"), *many))
    assert before <= more and len(more - before) <= 5
    assert held(many) != {row for row in held(rows(*map(str, range(200, 400))))}


def test_equal_rows_are_on_one_side_whosever_they_are():
    common, own = rows(*map(str, range(60))), {name: rows(*(f"{name} {i}" for i in range(5))) for name in "abc"}
    given = [ClientData(name, (*mine, *common, *common[:20])) for name, mine in own.items()]
    found = ByContent(0).hold_out(given, "test", 0.3)
    trained = {row for client in found for row in client.train}
    tested = {row for client in found for row in client.test}
    assert tested and trained and not trained & tested
    assert len({frozenset({*client.test} & {*common}) for client in found}) == 1


@pytest.mark.parametrize("share", [1e-9, 0.2, 0.999999])
def test_a_client_with_two_rows_has_one_on_each_side(share):
    given = [ClientData(f"{n}", rows(*(f"{n} {i}" for i in range(size)))) for n, size in enumerate((1, 2, 2, 3, 7))]
    sizes = [(len(client.train), len(client.test)) for client in ByContent(0).hold_out(given, "test", share)]
    assert sizes[0] == (1, 0) and all(train and test for train, test in sizes[1:])
    assert [sum(each) for each in sizes] == [1, 2, 2, 3, 7]


def test_where_clients_hold_the_same_two_rows_each_has_both_sides():
    x, y, z = rows("x", "y", "z")
    for seed in range(20):
        found = ByContent(seed).hold_out([ClientData("a", (x, y)), ClientData("b", (y, x))], "test", 0.2)
        assert found[0].test == found[1].test and len(found[0].test) == 1
        # Three clients that share two rows each: two of three rows must be trained on, so one client tests none.
        given = [ClientData("a", (x, y)), ClientData("b", (y, z)), ClientData("c", (z, x))]
        found = ByContent(seed).hold_out(given, "test", 0.2)
        assert all(client.train for client in found)
        assert not {row for c in found for row in c.train} & {row for c in found for row in c.test}


def test_what_others_train_on_is_not_held_out():
    many = rows(*map(str, range(50)))
    alone, beside = (ByContent(0).hold_out([ClientData("a", many)], "validation", 0.3, others)[0].validation
                     for others in ((), [ClientData("b", many[:25], many[:1])]))  # fmt: skip
    assert set(beside) == set(alone) - {*many[:25]} != set(alone)


def test_a_client_whose_rows_are_all_equal_trains_and_is_not_scored(tmp_path):
    write(tmp_path / "north.jsonl", range(9))
    write(tmp_path / "south.jsonl", [3, 3, 3])
    south = load(tmp_path).clients["south"]
    assert (len(south.train), len(south.test)) == (3, 0)


# What a run remembers


def test_known_rows_stay_and_new_ones_are_divided_by_their_hash(tmp_path):
    path = write(tmp_path / "north.jsonl", range(20))
    write(tmp_path / "south.jsonl", range(100, 120))
    begun = load(tmp_path)
    # Everything that the run tested is gone, and what is left was trained on.
    write(path, [row.removeprefix("question ") for row in prompts(begun, "train")["north"]])
    known = record_of(begun)
    later = load(tmp_path, known)
    assert prompts(later, "train")["north"] == prompts(begun, "train")["north"] and not prompts(later, "test")["north"]
    assert load(tmp_path).clients["north"].test  # a new run divides what there is
    fresh = load(tmp_path, Record.of([]))
    assert prompts(fresh, "test") == prompts(load(tmp_path), "test")


def test_a_row_that_was_trained_on_is_not_tested_from_a_test_file_either(tmp_path, caplog):
    for client, start in (("north", 0), ("south", 100)):
        write(tmp_path / f"{client}-train.jsonl", range(start, start + 9))
        write(tmp_path / f"{client}-test.jsonl", range(start + 9, start + 12))
    begun = load(tmp_path, validation=0.2)
    assert load(tmp_path, record_of(begun), validation=0.2) == begun and not caplog.text
    write(tmp_path / "north-train.jsonl", [0, 1, 2, 3, 4, 5, 10, 200])  # 10 was tested, by another client perhaps
    write(tmp_path / "south-test.jsonl", [109, 110, 111, 6, 7, 8])
    with caplog.at_level(logging.WARNING):
        later = load(tmp_path, record_of(begun), validation=0.2)
    trained, tested = (
        {prompt for own in prompts(later, split).values() for prompt in own} for split in ("train", "test")
    )
    assert "question 10" in tested - trained and not {f"question {row}" for row in (6, 7, 8)} & tested
    assert "1 train example of these data belongs to the test split, where the run has had it" in caplog.text


@pytest.mark.parametrize("change, words", [
    (lambda north, south: write(north, [*range(20), 50, 51, 52]), "3 rows are new"),
    (lambda north, south: write(north, [50, *range(1, 20)]), "1 row is new, 1 row is gone"),
    (lambda north, south: write(north, [*range(20), 100]), "1 row is new"),
    (lambda north, south: write(north, range(19, -1, -1)), "the same rows, in another order or spelling"),
    (lambda north, south: north.write_text(north.read_text().replace("question 3", "QUESTION 3")),
     "the same rows, in another order or spelling"),
    (lambda north, south: south.rename(south.with_name("west.jsonl")),
     "clients: west is new, south is gone"),
    (lambda north, south: north.touch(), ""),
])  # fmt: skip
def test_what_has_changed_is_said(tmp_path, change, words):
    north, south = write(tmp_path / "north.jsonl", range(20)), write(tmp_path / "south.jsonl", range(100, 120))
    before = record_of(load(tmp_path))
    change(north, south)
    assert record_of(load(tmp_path, before)).since(before) == words


def test_rows_that_are_gone_stay_known(tmp_path):
    path = write(tmp_path / "north.jsonl", range(30))
    write(tmp_path / "south.jsonl", range(100, 120))
    first = record_of(load(tmp_path))
    write(path, range(5, 30))
    second = record_of(load(tmp_path, first)).after(first, 3)
    assert second.changes == ((3, "5 rows are gone"),)
    write(path, range(30))
    data = load(tmp_path, second)
    third = record_of(data).after(second, 4)
    assert prompts(data, "test") == prompts(load(tmp_path), "test")
    assert third.changes[-1].words == "5 rows are new"
    assert not third.since(record_of(data)) and not record_of(load(tmp_path, third)).since(third)


def test_a_record_goes_through_json(tmp_path):
    write(tmp_path / "Zürich.jsonl", range(30))
    record = record_of(load(tmp_path)).after(record_of(load(tmp_path)), 1)
    again = Record.from_json(json.loads(json.dumps(record.as_json())))
    assert again.as_json() == record.as_json() and again.clients == ("Zürich",)
    assert len(json.dumps(record.as_json())) < 30 * 13 + 300
    digests = common.digests(load(tmp_path).clients["Zürich"].train)
    assert again.splits_of(digests).tolist() == [TRAINING] * len(digests)
    assert again.splits_of(np.array([1, 2], np.uint64)).tolist() == [0, 0]


def test_two_runs_know_together_what_each_knows(tmp_path):
    write(tmp_path / "north.jsonl", range(40))
    one, other = (record_of(load(tmp_path, seed=seed)) for seed in (0, 1))
    both = together([one, other])
    digests = np.concatenate([one.digests, np.array([5], np.uint64)])
    assert (both.splits_of(digests) == one.splits_of(digests) | other.splits_of(digests)).all()
    data = load(tmp_path, both)
    trained_by_any = {prompt for seed in (0, 1) for prompt in prompts(load(tmp_path, seed=seed), "train")["north"]}
    assert not trained_by_any & {*prompts(data, "test")["north"], *prompts(data, "validation")["north"]}
    assert together([one, Record.from_json(one.as_json())]) is one and together([]) is None


@pytest.mark.parametrize("each", [False, True])
def test_what_the_server_took_it_takes_again(tmp_path, each):
    """Though the data have its rows among the training examples, too, and more rows come."""
    for client, start in (("north", 0), ("south", 100)):
        write(tmp_path / f"{client}-train.jsonl", range(start, start + 9))
        write(tmp_path / f"{client}-test.jsonl", range(start + 3, start + 18))
    server = ServerConfig(examples=4, each=each)
    begun = load(tmp_path, server=server)
    assert load(tmp_path, record_of(begun), server=server) == begun
    write(tmp_path / "north-test.jsonl", [*range(200, 230), *range(3, 18)])
    later = load(tmp_path, record_of(begun), server=server)
    assert begun.server and later.server and {*begun.server.train} == {*later.server.train}
    assert not {row for client in later.clients.values() for row in client.test} & {*begun.server.train}


def test_what_the_server_took_is_not_tested_where_it_has_moved_to_the_training_file(tmp_path):
    """Clients' training and test examples become one pool, of which a share is tested."""
    write(tmp_path / "north-train.jsonl", range(20))
    write(tmp_path / "north-test.jsonl", range(100, 110))
    how = {"server": ServerConfig(examples=6), "partition": PartitionConfig(test=0.3)}
    begun = load(tmp_path, **how)
    assert begun.server
    took = [int(str(example.prompt).split()[1]) for example in begun.server.train]
    write(tmp_path / "north-train.jsonl", [*range(20), *took])
    write(tmp_path / "north-test.jsonl", [*(row for row in range(100, 110) if row not in took), *range(200, 220)])
    later = load(tmp_path, record_of(begun), **how)
    assert not {f"question {row}" for row in took} & {*prompts(later, "test")["north"]}


def test_what_the_server_trained_on_is_not_held_out_though_an_equal_row_was():
    own = ClientData("north", rows(*map(str, range(9))))
    digests = common.digests(own.train)
    known = Record.of([own]).divided([ClientData("north", (), validation=own.train)], own)
    assert known.splits_of(digests).tolist() == [SERVER | VALIDATION] * 9
    (divided,) = ByContent(0, known).hold_out([own], "validation", 0.3)
    assert not divided.validation


def test_pictures_and_partitions_of_them(tmp_path):
    """What is added to an npz file moves no picture; a run knows its pictures."""

    def save(count: int) -> None:
        pixels = np.arange(count, dtype=np.uint8).repeat(27).reshape(count, 3, 3, 3)
        np.savez(tmp_path / "a.npz", x=pixels, y=np.arange(count) % 2, domain=np.arange(count) % 2,
                 domains=np.array(["photo", "art"]), classes=np.array(["dog", "guitar"]))  # fmt: skip

    def tested(known: Record | None = None) -> tuple[set[int], Record]:
        data = tasks.load(TaskConfig("pacs", str(tmp_path / "a.npz")), 0, known=known)
        return {int(p.pixels[0, 0, 0]) for c in data.clients.values() for p in (*c.test, *c.validation)}, record_of(
            data
        )

    save(120)
    before, known = tested()
    save(140)
    after, record = tested(known)
    assert {number for number in after if number < 120} == before == {n for n in tested()[0] if n < 120}
    assert record.since(known) == "20 rows are new"
    assert (record.checksum_of(TEST), record.checksum_of(VALIDATION)) != (known.checksum_of(TEST), "")


# A generator of data that change


@pytest.mark.parametrize("seed", range(25))
def test_what_was_trained_is_never_held_out(tmp_path, seed):
    growing.case(seed, tmp_path / "data")


@pytest.mark.slow
def test_what_was_trained_is_never_held_out_in_many_federations(tmp_path):
    assert sum(growing.case(seed, tmp_path / "data") for seed in range(100, 3100)) > 12_000


@pytest.mark.parametrize("size, most", [(2, 0.08), (5, 0.005), (20, 0.0)])
def test_an_added_row_moves_hardly_any_into_the_test_split(size, most):
    found = np.array([growing.moved(size, seed) for seed in range(400)])
    assert (found[:, 0] > 0).mean() <= most
