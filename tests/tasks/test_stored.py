"""Examples on the disk are what was put there, and become objects only while somebody looks at them."""

import errno

import pytest

from llm_fed.basics.errors import RunError
from llm_fed.tasks import collected
from llm_fed.tasks.collected import Store, Stored
from llm_fed.tasks.common import Example, Turn, hold_out, select

EXAMPLES = [
    Example("Which ward?", ("Surgery.", "surgery"), ("Surgery.", "Eyes."), "north"),
    Example("half of a character: \ud83d", ("\udc00",)),
    Example((Turn("system", "Be short."), Turn("user", "Which ward?")), ("Eyes.",), group="south"),
    Example("Zürich, 東京", ("no group and no options",)),
    Example((Turn("user", "?"), Turn("assistant", "", False, "{}"), Turn("tool", "4")), ("",), fields='{"a": 1}'),
]


@pytest.fixture(params=[2, collected.BATCH])
def kept(request, monkeypatch) -> Stored:
    """The examples, written in batches of two and in one."""
    monkeypatch.setattr(collected, "BATCH", request.param)
    store = Store()
    return Stored(store, map(store.add, EXAMPLES))


def test_what_is_read_is_what_was_added(kept):
    assert list(kept) == EXAMPLES and kept == EXAMPLES and [kept[place] for place in range(-5, 0)] == EXAMPLES
    assert kept[1:3] == EXAMPLES[1:3] and kept.take([3, 0]) == [EXAMPLES[3], EXAMPLES[0]]
    assert kept != EXAMPLES[:3] and kept != [*EXAMPLES[:3], EXAMPLES[0]]
    assert type(kept[0].answers) is tuple and type(kept[2].prompt[0]) is Turn


def test_what_is_chosen_stays_on_the_disk(kept):
    train, test = hold_out(kept, 0.5, 0, "ada", "test")
    assert type(train) is type(test) is type(select(kept, [1])) is Stored
    both = train + test
    assert type(both) is Stored and sorted(map(str, both)) == sorted(map(str, EXAMPLES))
    assert train + (EXAMPLES[0],) == (*train, EXAMPLES[0])
    assert hold_out(EXAMPLES, 0.5, 0, "ada", "test") == (train, test)  # of a list, the same ones


def test_an_empty_store():
    assert list(Stored(Store())) == []


def test_a_full_disk_is_named(monkeypatch):
    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(collected.tempfile, "NamedTemporaryFile", full)
    monkeypatch.setattr(collected, "BATCH", 2)
    store = Store()
    store.add(EXAMPLES[0])
    with pytest.raises(RunError, match="cannot write the examples to .*No space left on device; .*TMPDIR"):
        store.add(EXAMPLES[1])


def test_few_examples_need_no_file(monkeypatch):
    monkeypatch.setattr(collected.tempfile, "NamedTemporaryFile", None)
    store = Store()
    assert list(Stored(store, map(store.add, EXAMPLES))) == EXAMPLES
