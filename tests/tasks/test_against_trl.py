"""Tokens and loss of conversations against TRL's own trainer, where TRL is installed (`pip install trl`); llm_fed does
not need it."""

import random
from typing import Any

import datasets
import pytest
import tiny
from byte_tokenizer import MARKED, byte_tokenizer
from talks import encode_conversation

from llm_fed.tasks.common import Turn

trl = pytest.importorskip("trl", reason="TRL is not installed")


def conversations() -> list[list[dict[str, str]]]:
    """Ten of one to five pairs of turns, every other one with a system message."""
    draws, found = random.Random(0), []
    for number in range(10):
        talk = [{"role": "system", "content": "Be short."}] * (number % 2)
        for _ in range(1 + number // 2):
            asked, told = ("".join(draws.choices("abc 123", k=draws.randint(1, 9))) + "." for _ in range(2))
            talk += [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        found.append(talk)
    return found


def test_ten_conversations_have_the_tokens_and_the_loss_of_trl(tmp_path):
    talks, tokenizer = conversations(), byte_tokenizer(chat_template=MARKED)
    settings = trl.SFTConfig(
        str(tmp_path), assistant_only_loss=True, max_length=None, use_cpu=True, report_to="none", bf16=False
    )
    data = datasets.Dataset.from_dict({"messages": talks})
    model: Any = tiny.build("llama", vocab_size=len(tokenizer))
    trainer = trl.SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    for talk, stock in zip(talks, trainer.train_dataset, strict=True):
        (batch,) = [trainer.data_collator([stock])]
        ours = encode_conversation([Turn(**turn) for turn in talk], tokenizer, template="chat")
        assert ours.input_ids == batch["input_ids"][0].tolist() == list(stock["input_ids"])
        assert ours.target == [label != -100 for label in batch["labels"][0].tolist()]
        assert sum(ours.target) > 2 * sum(turn["role"] == "assistant" for turn in talk)
