"""Losses on preferences against plain torch around stock PEFT, what their references are, and what fused training and
noisy steps make of them."""

import math
from dataclasses import replace

import every
import pytest
import tiny
import torch
from byte_tokenizer import byte_tokenizer
from preference_runs import LORA, adapted, encoded_pairs, federation, gradient, judged, moved, trained, with_reference
from torch.nn.functional import logsigmoid

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import Secret
from llm_fed.engine import gradients
from llm_fed.engine.fit import fit
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import GradientMoments, PerExample
from llm_fed.settings.objective import ObjectiveConfig

OBJECTIVES = [
    ObjectiveConfig("dpo", beta=0.3),
    ObjectiveConfig("ipo", beta=0.2),
    ObjectiveConfig("kto", beta=0.3),
    ObjectiveConfig("orpo"),
    ObjectiveConfig("simpo", gamma=0.7),
]
REFERRING = ("dpo", "ipo", "kto")


@pytest.fixture(scope="module")
def base():
    """A tokenizer, and a model in float64."""
    tokenizer = byte_tokenizer()
    return tokenizer, tiny.build("llama", torch.float64, vocab_size=len(tokenizer), max_position_embeddings=128)


def by_hand(model, objective: ObjectiveConfig, state, examples) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss and its gradient, one sequence after another, with the formulas of the papers."""
    wrapped = tiny.stock_peft(model, LORA, state).eval()
    entries, beta = tiny.peft_entries(wrapped), objective.strength

    def logp(text) -> tuple[torch.Tensor, int]:
        ids = torch.tensor([text.input_ids])
        logps = wrapped(input_ids=ids).logits[0, :-1].log_softmax(-1)
        target = torch.tensor(text.target[1:])
        return logps[target, ids[0, 1:][target]].sum(), int(target.sum())

    losses = []
    for example in examples:
        if objective.name == "kto":
            ratio = logp(example.text)[0] - example.reference[0]
            value = torch.sigmoid(beta * ratio if example.desirable else -beta * ratio)
            losses.append(1 - value)
            continue
        (chosen, m), (rejected, n) = logp(example.chosen), logp(example.rejected)
        one, other = example.reference
        if objective.name == "dpo":
            losses.append(-logsigmoid(beta * (chosen - one - (rejected - other))))
        elif objective.name == "ipo":
            losses.append(((chosen - one) / m - (rejected - other) / n - 1 / (2 * beta)) ** 2)
        elif objective.name == "simpo":
            losses.append(-logsigmoid(beta * chosen / m - beta * rejected / n - objective.gamma))
        else:  # the odds of p are p / (1 - p)
            p, q = (chosen / m).exp(), (rejected / n).exp()
            losses.append(-chosen / m - beta * logsigmoid((p / (1 - p)).log() - (q / (1 - q)).log()))
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: entry.grad for name, entry in entries.items()}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda its: its.name)
def test_loss_and_gradient_are_those_of_the_papers(base, objective):
    tokenizer, model = base
    examples = encoded_pairs(tokenizer)
    examples = judged(examples) if objective.name == "kto" else examples
    if objective.name in REFERRING:
        examples = with_reference(model, objective, examples)
        assert len({value for example in examples for value in example.reference}) > 10
    state = moved(model)
    loss, ours = gradient(model, objective, state, examples)
    expected, theirs = by_hand(model, objective, state, examples)
    assert loss == pytest.approx(expected, abs=1e-10)
    for name, entry in theirs.items():
        assert float((ours[name] - entry).abs().max()) <= 1e-10
    assert max(float(entry.abs().max()) for entry in theirs.values()) > 1e-4


FUSED = [(name, reference) for name in ("dpo", "kto") for reference in ("base", "message", "last")]


@pytest.mark.parametrize(
    ("name", "reference"),
    every.quick([*FUSED, ("orpo", "base")], [("dpo", "last"), ("kto", "message"), ("orpo", "base")]),
)
def test_fused_is_one_by_one(base, name, reference):
    objective = ObjectiveConfig(name, reference=reference)
    fused, alone = (trained(federation(base, objective, dropout=0.1), per_pass=count) for count in (3, 1))
    for id, (state, losses) in fused.items():
        assert float((state.row - alone[id][0].row).abs().max()) <= 1e-10
        assert losses == pytest.approx(alone[id][1], abs=1e-6)
        assert losses[1] != losses[0]


def test_each_reference_is_the_model_that_its_name_says(base):
    """Against the model with which a fit begins the first loss is log 2. `last` is what the client ended with, whatever
    it is sent."""
    firsts = {}
    for reference in ("base", "message", "last"):
        clients = federation(base, ObjectiveConfig("dpo", reference=reference), steps=2)
        firsts[reference] = {
            id: losses[::2] for id, (_, losses) in trained(clients, rounds=3, blend=0.5).items()
        }  # fmt: skip
    for id, first in firsts["message"].items():
        assert first == pytest.approx([math.log(2)] * 3, abs=1e-6)
        assert firsts["base"][id][0] == firsts["last"][id][0] == pytest.approx(math.log(2), abs=1e-6)
        assert abs(firsts["base"][id][2] - math.log(2)) > 1e-3 < abs(firsts["last"][id][2] - math.log(2))
        assert firsts["base"][id][2] != pytest.approx(firsts["last"][id][2], abs=1e-4)


def test_the_base_is_asked_once_for_each_example_and_other_references_once_a_round(base):
    counts = {}
    for reference in ("base", "message"):
        asked: list[int] = []
        trained(federation(base, ObjectiveConfig("dpo", reference=reference)), rounds=3, asked=asked)
        counts[reference] = sum(asked)
    assert counts["base"] == 10 + 9 + 8  # examples of the three clients
    assert counts["base"] < counts["message"] <= 3 * counts["base"]


def test_noisy_steps_clip_a_pair(base):
    """Without noise, of one pair: the step is as long as the clip, in the direction of the pair's gradient."""
    tokenizer, model = base
    objective, clip = ObjectiveConfig("dpo", beta=0.3), 1e-3
    pairs = with_reference(model, objective, encoded_pairs(tokenizer))[:3]
    start = moved(model)
    private = PerExample(clip, 0.0, len(pairs), Secret.fresh())
    job = tiny.fit_on("c", LORA, start, [pairs], Optimizer(1.0, "sgd"), private=private)
    ((result,), _) = fit(adapted(model, objective), [job])
    each = [gradient(model, objective, start, [pair])[1].row for pair in pairs]
    assert all(float(own.norm()) > clip for own in each)
    expected = start.row - sum(clip * own / own.norm() for own in each) / len(pairs)
    assert float((result.state.row - expected).abs().max()) <= 1e-12


def test_moments_of_gradients_are_of_pairs_and_no_labels_are_drawn(base):
    tokenizer, model = base
    state = moved(model)
    for objective in (ObjectiveConfig("dpo", beta=0.3), ObjectiveConfig("ipo", beta=0.2)):
        pairs = with_reference(model, objective, encoded_pairs(tokenizer))
        asked = GradientMoments("c", LORA, state, state, pairs)
        (found,) = gradients.evidence(adapted(model, objective), [asked])
        each = torch.stack([gradient(model, objective, state, [pair])[1].row for pair in pairs])
        torch.testing.assert_close(found.moments.mean[0].double(), -each.mean(0), rtol=1e-4, atol=1e-7)
        with pytest.raises(UserError, match=f"examples of objective.name={objective.name} have none"):
            gradients.evidence(adapted(model, objective), [replace(asked, sampled=True)])
