"""A tiny base with three adapters, prompts of unequal lengths, and what stock PEFT answers to each alone."""

from contextlib import closing

import tiny
import tiny_base
import torch
from transformers import GenerationConfig

from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.continuous import LiveAnswer
from llm_fed.engine.generation import generate, room_after
from llm_fed.models.lora import Lora, layout
from llm_fed.models.prompt import stop_tokens
from llm_fed.state import State

DOUBLE = torch.float64
STOPS = [0, 1, 7, 12, 23, 31, 44]  # many, so that answers end at different lengths
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


class Setting:
    """A base, three adapters, the same in a bank, and prompts of 1 to 11 tokens for all of them."""

    def __init__(self, kind="llama", stops=STOPS, dtype=DOUBLE, autocast=None, **changes):
        model = tiny.build(kind, dtype, **changes)
        model.generation_config = GenerationConfig(eos_token_id=stops)
        self.base = tiny_base.around(model, autocast=autocast)
        words = self.base.tokenizer.convert_ids_to_tokens(stops)
        self.base.tokenizer.add_special_tokens({"additional_special_tokens": words})
        self.structure = Lora(3, 5, 0.0, tiny.TARGETS[kind])
        places, draws = layout(model, self.structure), generator(0, "states")
        rows = 0.3 * torch.randn(3, places.size, dtype=dtype, generator=draws)
        self.states = [State(places, row) for row in rows]
        self.bank = AdapterBank(model, self.structure, 3, dtype)
        for k, state in enumerate(self.states):
            self.bank.load(k, state)
        self.stock = [tiny.stock_peft(model, self.structure, state) for state in self.states]
        self.prompts = [
            (n % 3, torch.randint(2, tiny.VOCABULARY, (length,), generator=draws).tolist())
            for n, length in enumerate([5, 3, 11, 1, 8, 2, 7, 7, 4, 10, 6])
        ]

    def generate(self, prompts=None, max_new_tokens=12, batch_size=4):
        return generate(
            self.base, self.bank, prompts or self.prompts, max_new_tokens=max_new_tokens, batch_size=batch_size
        )

    def alone(self, row, prompt, max_new_tokens=12):
        """The answer of a PEFT model that holds this adapter, through transformers' own generation."""
        tokens = (
            self.stock[row]
            .generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )[0, len(prompt) :]
            .tolist()
        )
        end = next((i for i, token in enumerate(tokens) if token in STOPS), len(tokens))
        return self.base.tokenizer.decode(tokens[:end], skip_special_tokens=True)


def scored(setting):
    """Requests with one to five options of one to four tokens."""
    draws = generator(0, "options")
    return [
        (
            row,
            prompt,
            [torch.randint(2, tiny.VOCABULARY, (1 + (n + i) % 4,), generator=draws).tolist() for i in range(1 + n % 5)],
        )
        for n, (row, prompt) in enumerate(setting.prompts)
    ]


@torch.inference_mode()
def running(batch, base, prompts, max_new_tokens):
    """The tokens that a running batch answers, into which a prompt comes with every other step."""
    told, waiting, later, steps = [[] for _ in prompts], [], list(enumerate(prompts)), 0
    with closing(batch):
        while later or waiting or batch.rows:
            if later and steps % 2 == 0:
                n, (row, prompt) = later.pop(0)
                room = room_after(base, len(prompt), max_new_tokens)
                waiting.append(LiveAnswer(row, [*prompt], room, stop_tokens(base), told[n].append))
            waiting = (batch.step() if batch.rows else []) + waiting
            if new := batch.takes(waiting):
                waiting = [each for each in waiting if each not in new]
                waiting = batch.read(new) + waiting
            steps += 1
    assert all(tokens[-1] is None for tokens in told)
    return [tokens[:-1] for tokens in told]
