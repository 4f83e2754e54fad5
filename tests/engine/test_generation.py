"""Generation and option scoring: each row is what it would be alone with stock PEFT, whoever shares its batch."""

import warnings

import pytest
import tiny
import torch
from answers import SLIDING, STOPS, Setting, running, scored
from transformers import GenerationConfig

from llm_fed.basics.errors import RunError, UserError
from llm_fed.engine import generation
from llm_fed.engine.capture import Captures
from llm_fed.engine.continuous import RunningBatch
from llm_fed.engine.generation import most_rows, option_log_likelihoods
from llm_fed.engine.slots import SlotBatch, allowed


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("gpt2", {"initializer_range": 0.2}), ("qwen3", {}), ("qwen3", SLIDING)],
    ids=["llama", "gpt2", "qwen3", "sliding-window"],
)
def test_answers_are_those_of_stock_peft_whatever_the_batch(kind, changes):
    setting = Setting(kind, **changes)
    expected = [setting.alone(row, prompt) for row, prompt in setting.prompts]
    assert len({len(answer.split()) for answer in expected}) > 2
    for batch_size in (1, 100):
        assert setting.generate(batch_size=batch_size) == expected
    assert setting.generate(setting.prompts[::-1], batch_size=3) == expected[::-1]
    batches = [RunningBatch(setting.base, setting.bank, 4)]  # in which a server answers
    if allowed(setting.base, setting.bank):
        batches.append(SlotBatch(setting.base, setting.bank, 4, 40, Captures()))
    for batch in batches:
        came = running(batch, setting.base, setting.prompts, 12)
        assert [setting.base.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in came] == expected
    swapped = [((row + 1) % 3, prompt) for row, prompt in setting.prompts]
    assert setting.generate(swapped) != expected  # the adapters matter


def test_a_finished_row_leaves_the_batch():
    """Steps of a row: one for the prompt, one for each further token; the stop token is a step too."""
    setting = Setting()
    rows = []
    setting.base.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    answers = [answer.split() for answer in setting.generate()]
    assert sum(rows) == sum(min(len(answer) + 1, 12) for answer in answers)
    assert 12 in {len(answer) for answer in answers}


def test_sampling_settings_of_the_base_do_not_leak(caplog):
    setting = Setting()
    expected = setting.generate()
    setting.base.model.generation_config = GenerationConfig(
        eos_token_id=STOPS, do_sample=True, temperature=5.0, top_p=0.5, repetition_penalty=9.0, max_length=3
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert setting.generate() == expected
    assert not caplog.records


def test_an_end_token_that_is_text_ends_nothing():
    """What a base's generation_config.json declares counts among control tokens alone."""
    setting = Setting(stops=[1])
    expected = setting.generate()
    setting.base.model.generation_config = GenerationConfig(eos_token_id=[1, *STOPS[2:]])
    assert setting.generate() == expected and any(len(answer.split()) == 12 for answer in expected)
    words = setting.base.tokenizer.convert_ids_to_tokens(STOPS[2:])
    setting.base.tokenizer.add_special_tokens({"additional_special_tokens": words})
    assert setting.generate() != expected


def test_answers_end_where_the_context_is_full():
    """A context of 64 and a prompt of 60: five tokens, as the last one is not read. Its neighbour has room."""
    setting = Setting("gpt2", stops=[])
    setting.base.tokenizer.eos_token = None
    long = list(range(2, 62 - 2)) + [2, 3]
    answers = setting.generate([(0, long), (1, [5, 6])], max_new_tokens=12)
    assert [len(answer.split()) for answer in answers] == [5, 12]
    assert answers[0] == setting.alone(0, long, max_new_tokens=5)
    assert len(setting.generate([(0, long + [4] * 4)])[0].split()) == 1
    with pytest.raises(UserError, match="prompt of 65 tokens.*context of 'tiny' is 64"):
        setting.generate([(0, long + [4] * 5)])


def test_an_empty_prompt_is_named():
    with pytest.raises(UserError, match="no tokens"):
        Setting().generate([(0, [2]), (1, [])])


def looped(setting, requests, autocast=False):
    """The same by a plain loop: one sequence at a time, stock PEFT, no cache."""
    results: list[list[float]] = []
    for row, prompt, options in requests:
        results.append([])
        for option in options:
            with tiny.bfloat16(autocast), torch.no_grad():
                logits = setting.stock[row](input_ids=torch.tensor([prompt + option]), use_cache=False).logits
            scores = logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            results[-1].append(float(scores.gather(1, torch.tensor(option)[:, None]).sum()))
    return results


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_option_scores_are_those_of_a_plain_loop(kind):
    setting = Setting(kind)
    requests = scored(setting)
    expected = looped(setting, requests)
    for batch_size in (1, 4, 100):
        scores = option_log_likelihoods(setting.base, setting.bank, requests, batch_size=batch_size)
        assert [len(row) for row in scores] == [len(options) for _, _, options in requests]
        for ours, theirs in zip(scores, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=0, abs=1e-10)


def test_autocast_is_that_of_the_base():
    setting = Setting(dtype=torch.float32, autocast=torch.bfloat16)
    requests = scored(setting)
    scores = option_log_likelihoods(setting.base, setting.bank, requests, batch_size=4)
    exact, halved = looped(setting, requests), looped(setting, requests, autocast=True)
    flat = [torch.tensor([score for row in rows for score in row]) for rows in (scores, halved, exact)]
    assert (flat[0] - flat[1]).abs().max() < 0.2
    assert (flat[0] - flat[2]).abs().max() > 1e-3
    dtypes = set()
    setting.base.model.lm_head.register_forward_hook(lambda module, _, output: dtypes.add(output.dtype))
    setting.generate()
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("options", [[], [[3], []]])
def test_options_without_tokens_are_named(options):
    setting = Setting()
    with pytest.raises(UserError, match="one is empty"):
        option_log_likelihoods(setting.base, setting.bank, [(0, [2, 3], options)], batch_size=4)


def test_options_beyond_the_context_are_named():
    setting = Setting()
    fits = [(0, [2] * 60, [[3] * 5])]
    assert len(option_log_likelihoods(setting.base, setting.bank, fits, batch_size=4)[0]) == 1
    with pytest.raises(UserError, match="prompt of 60 tokens leaves no room for an answer of 6"):
        option_log_likelihoods(setting.base, setting.bank, [(0, [2] * 60, [[3], [3] * 6])], batch_size=4)


def test_the_most_rows_are_as_asked_for_or_by_device():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [most_rows(asked, device) for asked in (None, 7) for device in (cpu, gpu)] == [32, 256, 7, 7]


def test_a_cpus_batches_hold_so_many_tokens_and_logits(monkeypatch):
    setting, sizes = Setting(), []
    expected, asked = setting.generate(batch_size=8), scored(setting)
    options = option_log_likelihoods(setting.base, setting.bank, asked, batch_size=8)
    setting.base.model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    monkeypatch.setattr(generation, "TOKENS", 3 * (11 + 12))
    assert setting.generate(batch_size=8) == expected and max(sizes) == 3
    sizes.clear()
    monkeypatch.setattr(generation, "LOGITS", 1)
    scores = option_log_likelihoods(setting.base, setting.bank, asked, batch_size=8)
    assert all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(options, scores, strict=True))
    assert max(sizes) == 5  # the options of a request


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_where_a_device_runs_out_of_memory_half_is_tried(kind, caplog):
    setting, most = Setting(kind), 2
    expected, asked = setting.generate(batch_size=8), [request for request in scored(setting) if len(request[2]) == 1]
    scores = option_log_likelihoods(setting.base, setting.bank, asked, batch_size=8)

    def fail(module, inputs):
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")

    setting.base.model.lm_head.register_forward_pre_hook(fail)
    assert setting.generate(batch_size=8) == expected
    assert "half as many rows are tried" in caplog.text
    again = option_log_likelihoods(setting.base, setting.bank, asked, batch_size=8)
    assert torch.allclose(torch.tensor(again), torch.tensor(scores))
    most = 0
    with pytest.raises(RunError, match="out of memory even with one example"):
        setting.generate(batch_size=8)
