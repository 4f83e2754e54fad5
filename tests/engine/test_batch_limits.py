"""Batches of answers keep to the memory that is free: a batch size is the most, and half of it is tried otherwise."""

from __future__ import annotations

import logging

import pytest
import tiny
import torch
from answers import Setting, scored
from meter import Meter

from llm_fed.basics.errors import RunError
from llm_fed.engine import batch_limits
from llm_fed.engine.batch_limits import BatchLimit, most_rows, within
from llm_fed.engine.footprint import reading
from llm_fed.engine.generation import option_log_likelihoods
from llm_fed.engine.reading import forward
from llm_fed.testing.tiny import language_base, llama


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_a_row_takes_what_reading_its_prompt_was_said_to_take(kind):
    base = language_base(tiny.build(kind))
    ids, mask = torch.ones(2, 64, dtype=torch.int64), torch.ones(2, 64, dtype=torch.int64)
    mask[1, :9] = 0
    with torch.inference_mode(), Meter() as meter:
        _, cache = forward(base, ids, mask, None, keep=1, padded=True)
    said = reading(base, 64)
    assert 0.95 * meter.peak < 2 * said.peak < 1.2 * meter.peak
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 2 * 64 * said.token == kept and said.logits == 4 * tiny.VOCABULARY


@pytest.fixture
def small(monkeypatch):
    """Every batch is looked at, and so many bytes are free."""
    monkeypatch.setattr(batch_limits, "SMALL", 0)
    monkeypatch.setattr(batch_limits, "STEP", 1)
    return lambda free: monkeypatch.setattr(batch_limits, "free_memory", lambda device: 2 * free)


def test_rows_are_halved_until_they_fit(small, caplog):
    base = language_base(llama())
    small(10**12)
    each = BatchLimit(base, 64, 8).bytes(30)
    for free, rows in ((64 * each, 64), (64 * each - 1, 32), (17 * each, 16), (each, 1), (1, 1)):
        small(free)
        assert BatchLimit(base, 64, 8).rows(30) == rows
    assert len(caplog.records) == 1 and "have 32 rows and not 64" in caplog.text
    small(10 * each)
    assert BatchLimit(base, 64, 8).rows(3) > BatchLimit(base, 64, 8).rows(30)
    assert BatchLimit(base, 64, 8, logits=90).rows(30) < BatchLimit(base, 64, 8).rows(30)


def test_the_most_rows_are_as_asked_for_or_by_device():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [most_rows(asked, device) for asked in (None, 7) for device in (cpu, gpu)] == [32, 256, 7, 7]


def test_a_small_batch_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(batch_limits, "free_memory", lambda device: 0)
    assert BatchLimit(language_base(llama()), 32, 64).rows(64) == 32


def test_answers_and_scores_are_the_same_in_less_memory(small, caplog):
    setting, sizes = Setting(), []
    expected, asked = setting.generate(batch_size=8), scored(setting)
    options = option_log_likelihoods(setting.base, setting.bank, asked, batch_size=8)
    setting.base.model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    small(3 * BatchLimit(setting.base, 8, 12).bytes(11))
    assert setting.generate(batch_size=8) == expected
    assert 1 < max(sizes) < 8
    small(1)
    scores = option_log_likelihoods(setting.base, setting.bank, asked, batch_size=8)
    assert all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(options, scores, strict=True))
    assert "rows and not 8" in caplog.text


def test_where_a_device_runs_out_of_memory_half_is_tried(caplog):
    setting = Setting()
    expected, most = setting.generate(batch_size=8), 2

    def fail(module, inputs):
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")

    setting.base.model.lm_head.register_forward_pre_hook(fail)
    with caplog.at_level(logging.WARNING):
        assert setting.generate(batch_size=8) == expected
    assert "now 2 rows at a time" in caplog.text
    most = 0
    with pytest.raises(RunError, match="out of memory even with one example"):
        setting.generate(batch_size=8)


def test_what_was_answered_is_not_answered_again():
    done: list[int] = []

    def run(part):
        if len(part) > 2 or (done and len(part) > 1):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        done.extend(part)

    within([5, 6, 7, 8, 9], run)
    assert done == [5, 6, 7, 8, 9]
