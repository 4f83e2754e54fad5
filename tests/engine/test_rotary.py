"""Bases whose rotary frequencies depend on a text's length (LongRoPE, dynamic NTK): every row is read as it is alone,
whoever stands beside it and whatever was computed before. Training, gradients, losses, answers on both sides of the
border, shared beginnings and options are checks of `rows_alone`, against a fresh copy of the stock model."""

from typing import Any

import every_family
import pytest
import rows_alone
import tiny
import torch
import transformers as hf
from answers import running
from every_family import BORDER, CONTEXT
from stock_training import per_example_gradients

from llm_fed.engine import generation
from llm_fed.engine.continuous import RunningBatch
from llm_fed.models.rotary import Regimes, context, regimes, row_positions

BASES = [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic"), ("gemma3_text", "longrope")]


def trial(family: str, variant: str) -> rows_alone.Trial:
    return rows_alone.Trial(family, every_family.variants(family)[variant], torch.float64)


def build(family: str, variant: str) -> Any:
    return every_family.build(family, **every_family.variants(family)[variant])


@pytest.mark.parametrize(("family", "variant"), BASES)
def test_every_row_is_read_as_it_is_alone(family, variant):
    """As a server answers, too, and one word after another."""
    found = rows_alone.examine(family, every_family.variants(family)[variant])
    assert found.verdict == "equal", found
    tried = trial(family, variant)
    alone = generation.generate(tried.base, tried.bank, tried.prompts, max_new_tokens=9, batch_size=1)
    came = running(RunningBatch(tried.base, tried.bank, 4), tried.base, tried.prompts, 9)
    assert [tried._words(tokens) for tokens in came] == alone
    streamed = [*generation.stream(tried.base, tried.bank, tried.prompts[0][1], max_new_tokens=9)]
    assert tried._words(streamed) == alone[0]


def test_recomputed_activations_have_the_same_frequencies():
    """The backward pass reads a layer again."""
    plain, again = trial("llama", "dynamic"), trial("llama", "dynamic")
    again.model.gradient_checkpointing_enable({"use_reentrant": False})
    examples = tiny.examples(3, [40, 5, BORDER + 1])
    first, second = (per_example_gradients(each.model_with(1024), each.states[0], examples) for each in (plain, again))
    assert torch.equal(first, second)


def test_what_counts_as_a_regime():
    assert regimes(tiny.build("llama")) is None
    long, each = Regimes(16, False), Regimes(16, True)
    assert long.of(3) == long.of(16) != long.of(17) == long.of(40)
    assert each.of(3) == each.of(16) != each.of(17) != each.of(18)
    assert regimes(build("phi3", "longrope")) == Regimes(BORDER, False, read_again=True)
    assert regimes(build("llama", "dynamic")) == Regimes(BORDER, True)
    assert regimes(build("gemma3_text", "longrope")) == Regimes(BORDER, False)
    assert context(build("llama", "dynamic").config) == 4 * BORDER
    assert context(build("phi3", "longrope").config) == CONTEXT
    assert row_positions(torch.tensor([2, 4]), 4).tolist() == [[0, 1, 1, 1], [0, 1, 2, 3]]


def test_the_families_that_read_a_text_again_are_all_known():
    """Transformers says so in `prepare_inputs_for_generation`, in the families' own files alone."""
    from pathlib import Path

    from llm_fed.models.rotary import _READ_AGAIN

    files = Path(hf.__file__).parent.glob("models/*/modeling_*.py")
    again = {
        file.parent.name for file in files if "self.config.original_max_position_embeddings + 1" in file.read_text()
    }
    assert again == set(_READ_AGAIN)
