"""Pairs of answers for a tiny base, and what the engine makes of their losses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from llm_fed.engine import gradients, inference
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.engine import Engine
from llm_fed.engine.preferences import examples_of
from llm_fed.kinds.encoding import beside
from llm_fed.method.client import Client
from llm_fed.method.requests import Gradient, LogLikelihoods
from llm_fed.method.site import Data
from llm_fed.models.lora import Lora, draw
from llm_fed.runtime.local import LocalRuntime
from llm_fed.settings.config import LocalConfig
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.state import State
from llm_fed.tasks.common import AnswerPair, Encoded, Example, Judged, Turn
from llm_fed.tasks.templates import encoded
from llm_fed.testing.tiny import answers, language_base

LORA = Lora(rank=2, alpha=8, dropout=0.0, target_modules=("q_proj", "v_proj"))
PAIRS = [
    (
        f"Which ward for case {number}?",
        ("Burns. " * (1 + number % 3)).strip(),
        ("No idea, ask. " * (1 + number % 2)).strip(),
    )
    for number in range(10)
]


def encoded_pairs(tokenizer: Any) -> list[AnswerPair]:
    """PAIRS in the template `{prompt}` and a line break."""
    found = []
    for asked, chosen, other in PAIRS:
        one, two = (encoded(Example(asked, (answer,)), tokenizer, "plain") for answer in (chosen, other))
        found.append(AnswerPair(one, two))
    return found


def pairs_of_words(client: int, size: int) -> list[AnswerPair]:
    """`answers`, and beside each another one, of one word to three, which is not preferred."""
    found = []
    for index, (one, other) in enumerate(zip(answers(client, size), answers(client + 5, size), strict=True)):
        words, start = other.answer[-1 - index % 3 :], len(one.prompt)
        found.append(AnswerPair(one, Encoded([*one.prompt, *words], [False] * start + [True] * len(words))))
    return found


def judged(pairs: Sequence[AnswerPair]) -> list[Judged]:
    """The chosen answer of every other pair, and the rejected ones of those between."""
    items = [Judged((pair.rejected, pair.chosen)[n % 2], bool(n % 2), pair.chosen) for n, pair in enumerate(pairs)]
    return [beside(item, items[n - 1].text, 10**6) for n, item in enumerate(items)]


def moved(model: Any) -> State:
    """An adapter in float64 whose B is not zero."""
    state = draw(model, LORA, torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(state.row.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return state.like(state.row + 0.1 * noise)


def adapted(model: Any, objective: ObjectiveConfig) -> AdaptedModel:
    return AdaptedModel(model, LORA, examples_of(objective))


def with_reference(model: Any, objective: ObjectiveConfig, examples: Sequence[Any]) -> list[Any]:
    """The examples with what the base makes of them."""
    texts = [text for example in examples for text in example.texts]
    found = iter(inference.log_likelihoods(adapted(model, objective), None, texts))
    return [replace(example, reference=tuple(next(found) for _ in example.texts)) for example in examples]


def gradient(model: Any, objective: ObjectiveConfig, state: State, examples: Sequence[Any]) -> tuple[float, State]:
    """The mean loss and its gradient."""
    return gradients.mean_gradient(adapted(model, objective), Gradient("c", LORA, state, examples))


def conversation(*texts: str) -> tuple[Turn, ...]:
    """Turns of user and assistant by turns."""
    return tuple(Turn(("user", "assistant")[place % 2], text) for place, text in enumerate(texts))


def federation(
    base: tuple[Any, Any], objective: ObjectiveConfig, *, dropout: float = 0.0, steps: int = 3
) -> tuple[Any, dict[str, Client]]:
    """A base that trains with this loss, and three clients of 10, 9 and 8 examples."""
    tokenizer, model = base
    made, structure = language_base(model), replace(LORA, dropout=dropout)
    made = replace(made, trains=examples_of(objective))
    pairs, clients = encoded_pairs(tokenizer), {}
    for number in range(3):
        own: Sequence[Any] = pairs[number:]
        clients[f"c{number}"] = Client(
            f"c{number}", structure, LocalConfig(steps=steps, batch_size=2, lr=0.05), 0,
            lambda drawn: draw(model, structure, drawn, dtype=torch.float64),
            Data(judged(own) if objective.name == "kto" else own), objective=objective,
        )  # fmt: skip
    return made, clients


def trained(
    made: tuple[Any, dict[str, Client]],
    *,
    rounds: int = 2,
    per_pass: int = 3,
    blend: float = 1.0,
    asked: list[int] | None = None,
) -> dict[str, tuple[State, list[float]]]:
    """Each client's model after some rounds, and the losses of its steps.

    Args:
        blend: how much of what a client learned it begins the next round with.
        asked: is given how many examples the reference was asked of, each time.
    """  # fmt: skip
    base, clients = made

    class Counting(Engine):
        def execute(self, requests):
            if asked is not None and isinstance(requests[0], LogLikelihoods):
                asked.extend(len(request.examples) for request in requests)
            return super().execute(requests)

    async def work(client: Client) -> tuple[State, list[float]]:
        state, losses = client.initial(), []
        for number in range(rounds):
            client.begin(number + 1, client.local.lr)
            state = state + blend * (await client.fit(state) - state)
            losses += client.losses
        return state, losses

    found = LocalRuntime(Counting(base), per_pass).run({id: work(client) for id, client in clients.items()})
    for outcome in found.values():
        if isinstance(outcome, Exception):
            raise outcome
    return found
