"""Losses of a method's own for adapters: what they are given, that a client's are its own, and what is refused."""

from dataclasses import replace

import pytest
import tiny
import torch
from preference_runs import LORA, moved, pairs_of_words
from torch.nn.functional import cross_entropy

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import Secret
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.engine import Engine
from llm_fed.engine.fit import fit
from llm_fed.engine.preferences import examples_of
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, PerExample
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.testing.tiny import answers, language_base


def plain(logits, targets, columns):
    return cross_entropy(logits, targets, reduction="none")


def weighted(logits, targets, columns):
    return columns["weight"] * plain(logits, targets, columns)


def jobs(model, losses, weights=(1.0, 2.0, 0.5), **options) -> list[Fit]:
    """A fit of each client, whose examples have a weight."""
    found = []
    for client, loss in enumerate(losses):
        examples = [replace(own, extra={"weight": weights[client]}) for own in answers(client, 4)]
        batches = [examples[:2], examples[2:]]
        found.append(
            tiny.fit_on(f"c{client}", LORA, moved(model), batches, Optimizer(0.1, "sgd"), loss=loss, **options)
        )
    return found


@pytest.fixture(scope="module")
def adapted() -> AdaptedModel:
    return AdaptedModel(tiny.build("llama", torch.float64), LORA)


def rows(model: AdaptedModel, asked: list[Fit]) -> list[torch.Tensor]:
    results, _ = fit(model, asked)
    return [result.state.row for result in results]


def test_cross_entropy_as_a_function_is_cross_entropy(adapted):
    own, usual = (rows(adapted, jobs(adapted.model, [loss] * 3)) for loss in (plain, None))
    assert max(float((one - other).abs().max()) for one, other in zip(own, usual, strict=True)) <= 1e-12


def test_a_column_weighs_the_loss_and_each_client_has_its_own_function(adapted):
    """Plain SGD: twice the loss is twice the step, in the first of two steps."""
    start = moved(adapted.model).row
    asked = [replace(job, batches=job.batches[:1]) for job in jobs(adapted.model, [weighted, weighted, None])]
    usual = [replace(job, batches=job.batches[:1]) for job in jobs(adapted.model, [None] * 3)]
    for own, other, factor in zip(rows(adapted, asked), rows(adapted, usual), (1.0, 2.0, 1.0), strict=True):
        torch.testing.assert_close(own - start, factor * (other - start), rtol=1e-6, atol=1e-9)


def test_fused_is_alone_and_targets_come_with_their_examples(adapted):
    seen: dict[str, set[tuple[int, int]]] = {}

    def watching(name):
        def loss(logits, targets, columns):
            seen.setdefault(name, set()).update(zip(columns["example"].tolist(), targets.tolist(), strict=True))
            return weighted(logits, targets, columns)

        return loss

    asked = jobs(adapted.model, [watching(f"c{client}") for client in range(3)])
    fused, alone = rows(adapted, asked), [rows(adapted, [job])[0] for job in asked]
    assert max(float((one - other).abs().max()) for one, other in zip(fused, alone, strict=True)) <= 1e-10
    for client in range(3):
        expected = {(n, id) for n, own in enumerate(answers(client, 4)) for id in own.answer}
        assert seen[f"c{client}"] == expected


def test_noisy_steps_clip_each_examples_own_loss(adapted):
    private = PerExample(1e-3, 0.0, 2, Secret.fresh())
    (job,) = jobs(adapted.model, [weighted], private=private)
    (row,) = rows(adapted, [replace(job, batches=job.batches[:1])])
    assert 0 < float((row - moved(adapted.model).row).norm()) <= 0.1 * 1e-3 + 1e-12


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logits, targets, columns: cross_entropy(logits, targets), r"returned a tensor of shape \(\)"),
        (lambda logits, targets, columns: 1.0, "returned float for"),
    ],
)
def test_a_function_that_returns_no_loss_for_each_target_is_named(adapted, loss, message):
    with pytest.raises(UserError, match=f"client c0: loss=FUNCTION {message}.*a loss \\(n,\\) for each target"):
        rows(adapted, jobs(adapted.model, [loss]))


def test_files_with_different_columns_and_losses_on_preferences_are_refused(adapted):
    first, second = jobs(adapted.model, [weighted] * 2)
    mixed = replace(second, examples=[replace(own, extra={}) for own in second.examples])
    with pytest.raises(UserError, match="different further columns .none and weight."):
        rows(adapted, [first, mixed])
    base = language_base(adapted.model)
    engine = Engine(replace(base, trains=examples_of(ObjectiveConfig("dpo"))))
    job = tiny.fit_on("c", LORA, moved(adapted.model), [pairs_of_words(0, 2)], Optimizer(0.1), loss=plain)
    with pytest.raises(UserError, match="set objective.name=sft"):
        engine.execute([job])
