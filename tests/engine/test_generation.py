"""Generation and option scoring: each row is what it would be alone with stock PEFT, whoever shares its batch."""

from __future__ import annotations

import warnings

import every
import pytest
import tiny
import torch
from answers import SLIDING, STOPS, Setting, scored
from transformers import GenerationConfig

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.generation import option_log_likelihoods


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


def read(setting, work):
    """How many tokens the base reads, with padding, while `work` is done."""
    tokens = []
    hook = setting.base.model.get_input_embeddings().register_forward_hook(
        lambda _, given, out: tokens.append(given[0])
    )
    work()
    hook.remove()
    return sum(ids.numel() for ids in tokens)


# By row of the bank: the lengths of what its prompts share and of what follows.
SHARED = {0: (9, [1, 4, 2, 3, 1]), 1: (5, [3, 1, 2]), 2: (0, [2, 6])}


@pytest.mark.parametrize("prefixes", every.quick([[0], [0, 1], [0, 1, 2]], [[0, 1, 2]]), ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("batch_size", every.quick([2, 4, 100], [4]))
def test_a_shared_beginning_changes_no_answer_and_no_score(kind, prefixes, batch_size):
    setting, draws = Setting(kind, initializer_range=0.2), generator(0, "shared")

    def tokens(length):
        return torch.randint(2, tiny.VOCABULARY, (length,), generator=draws).tolist()

    prompts = [
        (row, start + tokens(length))
        for row, (start, lengths) in ((row, (tokens(SHARED[row][0]), SHARED[row][1])) for row in prefixes)
        for length in lengths
    ][::-1]
    assert setting.generate(prompts, batch_size=batch_size) == [setting.alone(*asked) for asked in prompts]
    requests = [(*asked, [tokens(1), tokens(3)]) for asked in prompts]
    scores = option_log_likelihoods(setting.base, setting.bank, requests, batch_size=batch_size)
    for ours, theirs in zip(scores, looped(setting, requests), strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-10)


@pytest.mark.parametrize(
    ("start", "changes", "expected"),
    [
        ([2, 3, 4, 5, 6, 7], {}, 6 + 3 * 1),  # once, and of each prompt the rest
        ([2], {}, 1 + 3 * 1),
        ([], {}, 3 * 1),
        ([2, 3, 4, 5, 6, 7], SLIDING, 3 * 7),  # padding between would shift the window
    ],
)
def test_a_shared_beginning_is_read_once(start, changes, expected):
    setting = Setting("qwen3", **changes)
    prompts = [(0, [*start, last]) for last in (8, 9, 10)]
    assert read(setting, lambda: setting.generate(prompts, max_new_tokens=1)) == expected


def test_one_token_in_common_is_not_worth_a_pass():
    setting = Setting()
    prompts = [(0, [2, *range(last, last + 9)]) for last in (8, 9, 10)]
    assert read(setting, lambda: setting.generate(prompts, max_new_tokens=1)) == 3 * 10


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
