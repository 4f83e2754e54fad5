"""The row store: what is written of single clients, when, and that nothing is lost."""

import os
from pathlib import Path

import pytest
import torch
import toy
from toy_rounds import go

from llm_fed.basics.errors import RunError
from llm_fed.methods.ca2fl import CA2FL
from llm_fed.runs import rows as rows_module
from llm_fed.runs.checkpoint import Checkpoints, CheckpointWarning
from llm_fed.runs.rows import Memory, RowStore
from llm_fed.state import State
from llm_fed.state.wire import WireError


def value(number: float) -> State:
    return State.of({"x": torch.full((50,), float(number))})


def filled(store: RowStore, count: int) -> Memory:
    memory = Memory(store)
    for i in range(count):
        memory[f"c{i}"] = value(i)
    return memory


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


@pytest.fixture
def work(monkeypatch) -> dict[str, int]:
    """How often rows were packed, hashed and written, and files read."""
    counts = dict.fromkeys(("pack", "_name_of", "write_file"), 0)

    def counted(name):
        real = getattr(rows_module, name)

        def call(*args, **options):
            counts[name] += 1
            return real(*args, **options)

        return call

    for name in counts:
        monkeypatch.setattr(rows_module, name, counted(name))
    return counts


def test_a_memory_is_a_dict_whose_values_are_messages(tmp_path):
    memory, plain = Memory(RowStore(tmp_path)), {}
    for mapping in (memory, plain):
        for i in range(4):
            mapping[f"cache/c{i}"] = {"n": i, "delta": [float(i), "é", None]}
        mapping["cache/c1"] = 7
        del mapping["cache/c0"]
        assert mapping.pop("cache/c2")["n"] == 2 and mapping.get("cache/c0") is None
    assert memory == plain and list(memory) == list(plain) and len(memory) == 2
    assert "cache/c3" in memory and "cache/c0" not in memory
    with pytest.raises(KeyError):
        memory["cache/c0"]
    with pytest.raises(TypeError, match="object cannot travel"):
        memory["cache/c1"] = object()
    assert memory["cache/c1"] == 7


def test_what_is_read_is_a_copy(tmp_path):
    """Changed in place or not, the memory is what was put there, in RAM and on the disk."""
    memory, mine = Memory(RowStore(tmp_path)), value(1)
    memory["c"] = mine
    mine.row.zero_()
    for _ in range(2):
        memory["c"].row.zero_()
        assert memory["c"].equal(value(1))
        memory.to_disk()


def test_a_checkpoint_touches_only_what_changed(tmp_path, work):
    """1000 rows, then 3 change. Each is packed, hashed and written once, and one that nobody holds never."""
    checkpoints = Checkpoints(tmp_path)
    memory = filled(checkpoints.store, 1000)
    assert work == {"pack": 1000, "_name_of": 0, "write_file": 0}
    checkpoints.save(1, {}, {"server": memory.rows})
    assert work == dict.fromkeys(work, 1000)
    for i in (5, 6, 7):
        memory[f"c{i}"] = value(-i)
        memory["gone"] = value(0.5)
        del memory["gone"]
    for round in (2, 3):
        checkpoints.save(round, {}, {"server": memory.rows})
        assert work == {"pack": 1006, "_name_of": 1003, "write_file": 1003}
    assert not memory["c5"].equal(value(5)) and memory["c5"].equal(value(-5))


def test_equal_rows_share_a_file(tmp_path, work):
    checkpoints = Checkpoints(tmp_path)
    memory = Memory(checkpoints.store)
    memory["a"], memory["b"] = value(1), value(1)
    checkpoints.save(1, {}, {"server": memory.rows})
    assert len(files(tmp_path / "rows")) == work["write_file"] == 1


def test_what_a_killed_process_left_half_written_is_deleted(tmp_path):
    (tmp_path / ".x.safetensors.partial").touch()
    RowStore(tmp_path)
    assert not list(tmp_path.iterdir())


def test_pruning_spares_what_a_checkpoint_or_the_run_refers_to(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    memory = filled(checkpoints.store, 2)
    checkpoints.save(1, {}, {"server": memory.rows})
    memory["c0"] = value(10)
    checkpoints.save(2, {}, {"server": memory.rows})
    memory["c1"], memory["c2"] = value(11), value(12)
    memory.to_disk()  # in no checkpoint
    assert len(files(tmp_path / "rows")) == 5
    checkpoints.prune(lambda round: round == 2)
    assert len(files(tmp_path / "rows")) == 4  # the first c0 is gone
    held = checkpoints.load(2).memory("server")
    assert list(held) == ["c0", "c1"] and held["c0"].equal(value(10)) and held["c1"].equal(value(1))
    assert memory["c1"].equal(value(11)) and memory["c2"].equal(value(12))
    del memory, held
    checkpoints.prune(lambda round: False)
    assert not files(tmp_path / "rows")


def test_a_damaged_row_makes_its_checkpoint_a_damaged_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    memory = filled(checkpoints.store, 2)
    checkpoints.save(1, {}, {"server": memory.rows})
    memory["c1"] = value(9)
    checkpoints.save(2, {}, {"server": memory.rows})
    path = tmp_path / "rows" / memory.rows["c1"].file()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(WireError, match="round-0002 is damaged: row .* does not have the content"):
        Checkpoints(tmp_path).load(2)
    with pytest.warns(CheckpointWarning, match="round-0002 is damaged"):
        saved = Checkpoints(tmp_path).latest()
    assert saved is not None and saved.round == 1 and saved.memory("server")["c1"].equal(value(1))


def test_a_row_that_cannot_be_read_or_written_ends_the_run(tmp_path, monkeypatch):
    memory = filled(RowStore(tmp_path), 1)
    (tmp_path / memory.rows["c0"].file()).unlink()
    with pytest.raises(RunError, match="cannot be read.*continues from a checkpoint that is whole"):
        memory["c0"]

    def full(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    memory["c1"] = value(1)
    with pytest.raises(RunError, match="No space left on device"):
        memory.to_disk()
    assert not list(tmp_path.glob(".*.partial"))


def test_a_row_that_a_client_cannot_read_ends_the_run_and_not_the_client(tmp_path):
    class Forgetful(CA2FL):
        async def client_update(self, client, message):
            client.memory["own"] = message
            client.memory.to_disk()
            for path in tmp_path.glob("checkpoints/rows/*"):
                path.unlink()
            assert client.memory["own"]
            return message

    with pytest.raises(RunError, match="cannot be read"):
        go(tmp_path, Forgetful(), config=toy.config(rounds=4))
