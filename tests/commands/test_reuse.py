"""What the runs of a comparison share of their data changes no run: each equals one in a process of its own."""

import sys
from dataclasses import replace
from pathlib import Path

import equal_runs
import every
import pytest
import small_run
import tiny_base

from llm_fed import tasks
from llm_fed.commands import compare
from llm_fed.experiment import finish, run
from llm_fed.kinds import encoding, reuse
from llm_fed.kinds.encoding import Encoder
from llm_fed.kinds.reuse import Reuse
from llm_fed.settings import configfile
from llm_fed.settings.config import TaskConfig
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.tasks.common import Example, Turn

CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TALK = (Turn("user", "w2"), Turn("assistant", "w3", trained=False), Turn("user", "w4"))
TEXTS = [
    Example("w2 w3", ("w4",)),
    Example("w2 w3", ("w4", "w5")),  # the same digest as no other, though all but an answer is equal
    Example(" ".join(["w2"] * 9), ("w4 w5 w6",)),
    Example("w3", ("w4 w5", "w6"), options=("w4 w5", "w7", "w7")),
    Example("W3", ("w4 w5", "w6"), options=("w7", "w4 w5")),  # the same row to `Example.digest`, and other tokens
    Example("w2 \ud83d", ("w3",)),
    Example("w2", ("</s> w3",)),
    Example("w5", ("<think> w6 </think> w7",)),
    Example("w5", ("<think> w6 </think>",)),
    Example("", ("w5 w6",)),
    Example(TALK, ("w5",)),
    Example("w8", ("w9",), extra=(("weight", 0.5),)),
    Example("w8", ("w9",), extra=(("weight", 0.25),)),
]
PAIRS = [
    Example(f"w{2 + i}", ("w4",), rejected=(Turn("user", f"w{2 + i}"), Turn("assistant", f"w{5 + i} w6")))
    for i in (0, 1)
]
JUDGED = [Example(f"w{2 + i}", (f"w{4 + i} w5",), desirable=i > 0) for i in (0, 1, 2)]


def encoded(examples, task, objective, shared, tokenizer):
    made = Encoder(tokenizer, task, rows=61, room=lambda length: 1, objective=objective, reuse=shared)
    (lengths,) = made.lengths([examples])
    training = made.training("c", "training", examples, required=False, lengths=lengths)
    queries = made.queries("c", "test", examples, lengths=lengths)
    return list(training), list(queries), made.cut(queries), made.note(), made.skipped


@pytest.mark.parametrize("template", ["plain", "own {prompt} w5", "chat"])
@pytest.mark.parametrize("too_long", ["skip", "cut-end", "cut-start"])
def test_an_example_is_encoded_as_without_other_runs(template, too_long, monkeypatch):
    """Under several settings by turns, in several orders, and where what is kept is full."""
    tokenizer = tiny_base.tokenizer(**tiny_base.SPECIAL)
    tokenizer.chat_template = CHAT
    shared, full = Reuse(), Reuse()
    full._bytes = reuse.MOST
    for _ in range(2):
        for objective, examples in (("sft", TEXTS), ("dpo", PAIRS), ("kto", JUDGED), ("sft", TEXTS[::-1])):
            for changes in ({}, {"loss_on": "all"}, {"max_length": 12}):
                task = replace(TaskConfig(max_length=99, template=template, too_long=too_long), **changes)
                asked = examples, task, ObjectiveConfig(name=objective)
                alone = encoded(*asked, None, tokenizer)
                assert encoded(*asked, shared, tokenizer) == alone and any(alone[0])
                assert encoded(*asked, full, tokenizer) == alone
    assert not full._packed and shared._packed
    monkeypatch.setattr(Encoder, "_look", pytest.fail)
    monkeypatch.setattr(Encoder, "encoded", pytest.fail)
    assert encoded(TEXTS, TaskConfig(max_length=99, template=template, too_long=too_long), ObjectiveConfig(), shared,
                   tokenizer)  # fmt: skip


def test_what_is_made_belongs_to_who_asked():
    """A caller that changes it changes no other one's."""
    tokenizer, shared = tiny_base.tokenizer(**tiny_base.SPECIAL), Reuse()
    task = TaskConfig(max_length=99, template="plain")
    for _ in range(3):
        (found,) = Encoder(tokenizer, task, reuse=shared).training("c", "training", TEXTS[:1])
        assert found.input_ids[-1] != 0
        found.input_ids[-1] = 0


@pytest.fixture
def counted(monkeypatch) -> dict[str, int]:
    """How often data were read, and how many examples were encoded."""
    counts = {"read": 0, "encoded": 0, "measured": 0}
    load, encode, measure = tasks.load, Encoder.encoded, Encoder._measured

    def loading(*given, **options):
        counts["read"] += 1
        return load(*given, **options)

    def encoding_one(self, example):
        counts["encoded"] += 1
        return encode(self, example)

    def measuring(self, examples):
        counts["measured"] += len(examples)
        return measure(self, examples)

    monkeypatch.setattr(tasks, "load", loading)
    monkeypatch.setattr(encoding.Encoder, "encoded", encoding_one)
    monkeypatch.setattr(encoding.Encoder, "_measured", measuring)
    return counts


@pytest.mark.parametrize("captured", every.quick(["auto", "on"], ["on"]))
def test_runs_of_a_comparison_equal_runs_alone(small, tmp_path, counted, monkeypatch, captured):
    """Byte for byte, with two methods and two seeds that hold other rows out; the data are read once for each seed,
    beside once to load the base, and each row is encoded once to be measured, once to train and once to be asked. Runs
    whose passes are captured share graphs, too."""
    monkeypatch.setattr(finish, "write_report", lambda folder: None)
    data = small_run.write_data(tmp_path / "data", {"train": 11})
    task, quick = {"path": str(data), "validation": 0.4}, {"max_new_tokens": 1, "cross": False}
    path = small.config(tmp_path / "c.yaml", rounds=2, task=task, eval=quick)
    out = tmp_path / "out"
    compare.compare(path, [f"engine.fast={captured}"], chosen=["fedit", "local"], seeds=[0, 1], out=out)
    shared = dict(counted)
    folders = sorted(config.parent for config in out.glob("*/config.yaml"))
    assert len(folders) == 4
    for folder in folders:
        counted.update(read=0, encoded=0, measured=0)
        alone = tmp_path / "alone" / folder.name
        run.train(configfile.load(folder / "config.yaml"), alone)
        ours, its = (equal_runs.without_neighbours(equal_runs.files(each)) for each in (folder, alone))
        assert ours.keys() == its.keys() and len(ours) > 5
        assert [name for name in ours if ours[name] != its[name]] == []
    assert len({(folder / "splits.json").read_bytes() for folder in folders}) == 2
    rows = 3 * 11
    assert counted["read"] == 1 and counted["measured"] == rows  # of one run alone
    assert shared["read"] == 1 + 2 and shared["measured"] == rows
    assert shared["encoded"] <= counted["encoded"] + rows


def test_a_run_that_knows_rows_is_given_them_anew(small, counted):
    """They keep their splits, which another run's rows do not."""
    config, shared = TaskConfig("files", str(small.data), template="plain"), Reuse()
    first = shared.task(config, 0, 0, None, absent=False)
    assert shared.task(config, 0, 0, None, absent=False) is first and counted["read"] == 1
    assert shared.task(config, 0, 0, first.record, absent=False) is not first and counted["read"] == 2
    assert shared.task(config, 1, 0, None, absent=False) is not first and counted["read"] == 3
    assert shared.task(config, 0, 0, None, absent=False) is not first and counted["read"] == 4


def test_what_is_kept_has_a_limit(monkeypatch):
    """However many settings and examples there are."""
    monkeypatch.setattr(reuse, "MOST", 5000)
    shared, tokenizer = Reuse(), tiny_base.tokenizer(**tiny_base.SPECIAL)
    for length in range(40, 60):
        made = Encoder(tokenizer, TaskConfig(max_length=length, template="plain"), reuse=shared)
        assert len(made.training("c", "training", TEXTS[:5])) == 5
    size = sum(len(packed) + sys.getsizeof(key) for key, packed in shared._packed.items())
    assert 1000 < size < 5000 and shared._bytes < 5500


def test_a_base_outside_of_comparisons_keeps_nothing(small):
    from llm_fed.bench.bases import Bases

    config = configfile.load(small.tree())
    assert Bases().of(config).reuse is None and Bases(reuse=True).of(config).reuse is not None
    assert isinstance(small.data, Path)
