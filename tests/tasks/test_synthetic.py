"""The task `planted` (what is held out, who conflicts with whom) and the base model that is shipped for it."""

import itertools
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_fed.settings.config import TaskConfig
from llm_fed.tasks import synthetic
from llm_fed.tasks.common import TEMPLATES, ClientData

ROOT = Path(__file__).parents[2]
BASE = ROOT / "llm_fed" / "assets" / "tiny-base"
SEEDS = range(4)


def clients(seed: int) -> dict[str, ClientData]:
    return synthetic.load(TaskConfig(name="planted"), seed).clients


def value(prompt: str, trait: str) -> str:
    (found,) = set(synthetic.TRAITS[trait]) & set(prompt.rstrip("?.").split())
    return found


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32), AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def script():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "make_tiny_base.py")))


def test_twelve_clients_in_three_groups_with_few_examples():
    data = clients(0)
    assert Counter(synthetic.group(client) for client in data) == {0: 4, 1: 4, 2: 4}
    assert {(len(c.train), len(c.validation), len(c.test)) for c in data.values()} == {(16, 16, 64)}


@pytest.mark.parametrize("seed", SEEDS)
def test_one_rule_answers_all_of_a_group(seed):
    rules: dict[int, dict[str, str]] = {}
    for name, client in clients(seed).items():
        group = synthetic.group(name)
        rule = rules.setdefault(group, {})
        for example in client.train + client.validation + client.test:
            decisive = value(example.prompt, synthetic.GROUP_TRAITS[group])
            assert (rule.setdefault(decisive, example.answers[0]),) == example.answers
    for rule in rules.values():
        assert Counter(rule.values()) == dict.fromkeys(synthetic.PENS, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_held_out_animal_is_in_any_clients_training(seed):
    def animals(split: str) -> set[tuple[str, str]]:
        examples = itertools.chain.from_iterable(getattr(client, split) for client in clients(seed).values())
        return {(value(e.prompt, "colour"), value(e.prompt, "kind")) for e in examples}

    train, validation, test = animals("train"), animals("validation"), animals("test")
    assert not train & test and not train & validation and not validation & test
    assert len(test) == synthetic.TEST and len(validation) == synthetic.VALIDATION


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_prompts_want_other_answers_in_other_groups(seed):
    data = clients(seed)
    prompts = {tuple(example.prompt for example in client.test) for client in data.values()}
    assert len(prompts) == 1  # so no prompt tells the group
    answers = zip(*([example.answers for example in client.test] for client in data.values()), strict=True)
    best = [Counter(column).most_common(1)[0][1] / len(data) for column in answers]
    assert sum(best) / len(best) < 0.6  # the best that a single model could score


def test_the_shipped_base_is_small_and_complete(shipped):
    model, tokenizer = shipped
    assert sum(file.stat().st_size for file in BASE.iterdir()) <= 4_000_000
    assert {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id} == {0, 1, 2}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    text = TEMPLATES["alpaca-short"].format(prompt="Naïve ünïcödé?")
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids, skip_special_tokens=True) == text
    assert all(len(tokenizer(pen, add_special_tokens=False).input_ids) == 1 for pen in synthetic.PENS)


def test_the_shipped_base_answers_as_its_texts_do(shipped, script):
    """Questions whose answer the texts settle; about the pens they say two things, so those are left out."""
    model, tokenizer = shipped
    documents = [text.rpartition("\n") for text in itertools.islice(script.texts(seed=0), 300)]
    asked = [(prompt + newline, answer) for prompt, newline, answer in documents if " pen " not in prompt]
    tokenizer.padding_side = "left"
    tokens = tokenizer([p for p, _ in asked], padding=True, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**tokens, max_new_tokens=4, do_sample=False)[:, tokens["input_ids"].shape[1] :]
    given = tokenizer.batch_decode(output, skip_special_tokens=True)
    right = sum(got == answer for got, (_, answer) in zip(given, asked, strict=True))
    assert len(asked) > 200 and right / len(asked) >= 0.98
