"""Answers in slots equal those of rows that are answered alone, whoever comes and goes beside them."""

import gc
import random
import weakref

import every
import hypothesis
import pytest
import tiny
import torch
from answers import SLIDING, Setting
from hypothesis import strategies as st

from llm_fed.basics.errors import RunError
from llm_fed.engine import continuous, slots
from llm_fed.engine.capture import Captures, Graphs
from llm_fed.engine.generation import generate


def answered(setting, batch_size, captures=None, **more):
    return generate(
        setting.base, setting.bank, setting.prompts, max_new_tokens=12, batch_size=batch_size, captures=captures, **more
    )


EACH = [(kind, dtype) for kind in sorted(slots.FAMILIES) for dtype in (torch.float64, torch.float32)]


@pytest.mark.parametrize(("kind", "dtype"), every.quick(EACH, [*EACH[::2], ("llama", torch.float32)]))
def test_slots_say_what_rows_in_batches_say(kind, dtype):
    setting = Setting(kind, dtype=dtype)
    assert slots.allowed(setting.base, setting.bank)
    expected = answered(setting, 4)
    assert len({len(answer.split()) for answer in expected}) > 2
    assert all(answered(setting, size, Captures()) == expected for size in (1, 3, 100))


def test_only_layers_that_see_all_tokens_are_in_slots():
    for setting in (Setting("qwen3", **SLIDING), Setting("mistral", sliding_window=4), Setting("gpt2")):
        assert not slots.allowed(setting.base, setting.bank)


def test_the_next_prompt_takes_a_slot_that_is_free():
    """Eight answers in two slots: no pass has one row but for the last answer's."""
    setting, rows = Setting(), []
    setting.base.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    answers = answered(setting, 2)
    steps = sum(min(len(answer.split()) + 1, 12) for answer in answers)
    assert sum(rows) == steps and max(rows) == 2
    assert len(rows) < steps / 2 + 12 + len(answers)


class Counted(Captures):
    """Pretended graphs that say what is done with them."""

    def __init__(self, error=None):
        super().__init__()
        self.done, self.error = [], error

    def fail(self):
        if self.error:
            raise self.error

    def graphs(self, device):
        counted = self

        class Counting(Graphs):
            def warm(self, run):
                counted.done.append("warm")
                run()

            def capture(self, run):
                counted.done.append("capture")
                counted.fail()
                return lambda: (counted.done.append("replay"), counted.fail(), run())[2]

        return Counting()


def test_a_step_is_captured_when_it_comes_again():
    setting, captures = Setting(stops=[1]), Counted()
    assert answered(setting, 4, captures) == answered(setting, 4)
    assert captures.done[:2] == ["warm", "capture"] and captures.done.count("capture") == 1
    assert captures.done.count("replay") > 20


@pytest.mark.parametrize(
    ("error", "why"), [("operation not permitted when capturing", "not permitted"), ("CUDA out of memory.", "memory")]
)
def test_what_cannot_be_captured_runs_as_it_is_written(error, why, caplog):
    setting, captures = Setting(stops=[1]), Counted(RuntimeError(error))
    expected = answered(setting, 4)
    assert [answered(setting, 4, captures) for _ in range(2)] == [expected] * 2
    assert captures.done == ["warm", "capture"] and len(caplog.records) == 1
    assert "answers are not captured" in caplog.text and why in caplog.text


class OutOfMemory(Counted):
    """Once, in a capture or a replay among the first ones."""

    def __init__(self, when):
        super().__init__(RuntimeError("CUDA out of memory. Tried"))
        self.when = when

    def fail(self):
        if len(self.done) >= self.when:
            self.when = 10**6
            raise self.error


@hypothesis.settings(max_examples=5)
@hypothesis.given(seed=st.integers(0, 2**32), size=st.integers(8, 40), width=st.sampled_from([4, 8, 256]))
def test_any_prompts_in_any_slots(seed, size, width):
    """Whatever ends when, and whatever fails."""
    draws = random.Random(seed)
    setting = Setting(stops=draws.sample(range(2, tiny.VOCABULARY), draws.randrange(1, 9)))
    words = [draws.randrange(2, tiny.VOCABULARY) for _ in range(400)]
    starts = [draws.randrange(380) for _ in range(draws.randrange(8, 40))]
    setting.prompts = [(n % 3, words[at : at + draws.randrange(1, 20)]) for n, at in enumerate(starts)]
    failing = [OutOfMemory(draws.randrange(12)), Counted(RuntimeError("not permitted"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "WIDTH", width)
        expected = answered(setting, 4)
        assert all(answered(setting, size, captures) == expected for captures in (Captures(), *failing))


def test_nothing_is_kept_of_what_was_known(monkeypatch):
    """Also before Python looks for circles: an evaluation of a large base would not fit twice."""
    put, kept = slots.SlotLayer.put, []

    def watched(self, *given):
        put(self, *given)
        kept.append(weakref.ref(self.keys))

    monkeypatch.setattr(slots.SlotLayer, "put", watched)
    setting = Setting()
    gc.disable()
    try:
        answered(setting, 3, Captures())
        assert kept and not any(each() is not None for each in kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("captures", [None, Captures()])
def test_after_an_interrupt_answers_are_what_they_were(captures, monkeypatch):
    setting, real, calls = Setting(), continuous.forward, 0
    expected = answered(setting, 3, captures)

    def interrupted(*given, **options):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(continuous, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answered(setting, 3, captures)
    assert answered(setting, 3, captures) == expected


@pytest.mark.parametrize("captures", [None, Captures()])
def test_numbers_that_are_none_end_it(captures):
    setting = Setting()
    setting.bank.rows.data[1] = float("nan")
    with pytest.raises(RunError, match="computes NaN"):
        answered(setting, 3, captures)
