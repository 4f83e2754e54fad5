"""Gradients and their moments, losses and logits, of language models and of image models, against autograd."""

from dataclasses import replace

import pytest
import tiny
import tiny_images
import torch
from stock_training import per_example_gradients
from tiny_images import BATCHES, LORA, MAKERS, assert_state, cross_entropy, loaded, stock
from torch import Tensor, nn

from llm_fed.basics.errors import ClientError, UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.engine import Engine
from llm_fed.engine.gradients import evidence
from llm_fed.merge.moments import Moments
from llm_fed.method.requests import GradientMoments
from llm_fed.method.server import Server
from llm_fed.models.lora import Lora, draw
from llm_fed.models.structure import Full
from llm_fed.settings.config import EvalConfig, LocalConfig
from llm_fed.state import State
from llm_fed.tasks.common import Encoded
from llm_fed.testing import federation

LENGTHS = [9, 4, 17, 6, 12, 5, 9]
BUDGETS = [None, 40, 1]  # all at once, a few at a time, one by one


def structure_of(kind: str) -> Lora:
    return Lora(rank=3, alpha=6, dropout=0.1, target_modules=tiny.TARGETS[kind])  # no dropout is expected to be active


def trained(model, structure: Lora, seed: int, dtype: torch.dtype = torch.float64) -> State:
    """An adapter with B unlike zero."""
    state = draw(model, structure, generator(seed), dtype)
    return state.like(state.row + 0.1 * torch.randn(state.row.shape, generator=generator(seed, "B"), dtype=dtype))


def looped(model, structure: Lora, state: State, examples: list[Encoded], labels: list[Tensor] | None = None) -> Tensor:
    """(N, P): one forward and one backward pass of stock PEFT per example, without dropout."""
    wrapped = tiny.stock_peft(model, structure, state).eval()
    rows = []
    for n, example in enumerate(examples):
        wrapped.zero_grad()
        ids = torch.tensor([example.input_ids])
        target = torch.tensor(example.target)[1:]
        log_p = wrapped(input_ids=ids).logits[0, :-1][target].float().log_softmax(1)
        answer = ids[0, 1:][target] if labels is None else labels[n]
        log_p.gather(1, answer[:, None]).sum().backward()
        entries = tiny.peft_entries(wrapped)
        rows.append(torch.cat([entries[name].grad.flatten() for name in state]))
    return torch.stack(rows)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_chunks_are_single_backward_passes(kind, budget):
    model, structure, examples = tiny.build(kind, torch.float64), structure_of(kind), tiny.examples(0, LENGTHS)
    state = trained(model, structure, 1)
    found = per_example_gradients(AdaptedModel(model, structure, budget=budget), state, examples)
    torch.testing.assert_close(found, looped(model, structure, state, examples), rtol=0, atol=1e-10)


def test_an_adapted_head_and_checkpointed_activations():
    model = tiny.build("llama", torch.float64, tie_word_embeddings=False)
    structure = Lora(rank=2, alpha=2, dropout=0.0, target_modules=("lm_head", "o_proj"))
    state, examples = trained(model, structure, 1), tiny.examples(0, LENGTHS)
    expected = looped(model, structure, state, examples)
    model.gradient_checkpointing_enable()
    found = per_example_gradients(AdaptedModel(model, structure, budget=40), state, examples)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def jobs(model, structure: Lora, **options) -> list[GradientMoments]:
    """Two clients with other states and other examples."""
    return [
        GradientMoments(
            f"c{k}",
            structure,
            trained(model, structure, 10 + k),
            trained(model, structure, 20 + k),
            tiny.examples(k, LENGTHS[k:]),
            seed=k,
            **options,
        )
        for k in range(2)
    ]


@pytest.mark.parametrize("budget", BUDGETS)
def test_moments_of_several_clients_are_those_of_the_loops(budget):
    """Eq. 19 and 54-56 of the POTARA paper, written with torch's own functions on the gradients of the loops."""
    model, structure = tiny.build("llama", torch.float64), structure_of("llama")
    asked = jobs(model, structure)
    for job, found in zip(asked, evidence(AdaptedModel(model, structure, budget=budget), asked), strict=True):
        loops = [looped(model, structure, state, list(job.examples)) for state in (job.first, job.second)]
        for s, rows in enumerate(loops):
            torch.testing.assert_close(found.fisher[s], rows.square().mean(0), rtol=0, atol=1e-10)
            torch.testing.assert_close(found.moments.variance[s], rows.var(0, correction=0), rtol=0, atol=1e-10)
        centred = [rows - rows.mean(0) for rows in loops]
        torch.testing.assert_close(found.moments.covariance, (centred[0] * centred[1]).mean(0), rtol=0, atol=1e-10)


def test_merged_moments_lose_no_digits():
    """A mean a million times the spread: sums of squares in float64 would leave four digits of the variance."""
    rows = 1e6 + torch.randn(2, 60, 5, generator=generator(0), dtype=torch.float64)
    whole = Moments.of(rows)
    parts = Moments.of(rows[:, :1]) + Moments.of(rows[:, 1:20]) + Moments.of(rows[:, 20:])
    assert parts.count == 60
    torch.testing.assert_close(parts.variance, whole.variance, rtol=1e-9, atol=0)
    torch.testing.assert_close(parts.covariance, whole.covariance, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        whole.covariance, torch.stack([torch.cov(rows[:, :, k], correction=0)[0, 1] for k in range(5)])
    )


def test_mean_losses_are_those_of_transformers():
    model, structure = tiny.build("llama", torch.float64), structure_of("llama")
    (job, _), (found, _) = (asked := jobs(model, structure)), evidence(AdaptedModel(model, structure), asked)
    for state, loss in zip((job.first, job.second), found.losses, strict=True):
        wrapped = tiny.stock_peft(model, structure, state).eval()
        total = count = 0
        for example in job.examples:
            ids, target = torch.tensor([example.input_ids]), torch.tensor([example.target])
            size = sum(example.target)
            total += wrapped(input_ids=ids, labels=ids.masked_fill(~target, -100)).loss.item() * size
            count += size
        assert loss == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_drawn_labels_change_the_fisher_information_alone(budget):
    """It is the mean over labels of the model: with many copies of one example, sum_y p(y) (d log p(y))^2."""
    model, structure = tiny.build("llama", torch.float64), structure_of("llama")
    model_of = AdaptedModel(model, structure, budget=budget)
    plain, drawn = (evidence(model_of, jobs(model, structure, sampled=sampled)) for sampled in (False, True))
    again = evidence(AdaptedModel(model, structure), jobs(model, structure, sampled=True))
    for one, other, third in zip(plain, drawn, again, strict=True):
        torch.testing.assert_close(one.moments.covariance, other.moments.covariance, rtol=0, atol=1e-10)
        assert one.losses == pytest.approx(other.losses)
        assert not torch.allclose(one.fisher, other.fisher)
        torch.testing.assert_close(other.fisher, third.fisher, rtol=0, atol=1e-10)  # whatever the chunks


def test_drawn_labels_follow_the_model():
    model, structure = tiny.build("llama", torch.float64), structure_of("llama")
    example = Encoded([5, 6, 7, 8], [False, False, False, True])
    state, copies = trained(model, structure, 1), 400
    asked = GradientMoments("c", structure, state, state, [example] * copies, sampled=True)
    (found,) = evidence(AdaptedModel(model, structure), [asked])
    with torch.no_grad():
        wrapped = tiny.stock_peft(model, structure, state).eval()
        p = wrapped(input_ids=torch.tensor([example.input_ids])).logits[0, 2].softmax(0)
    every = torch.stack(
        [looped(model, structure, state, [example], [torch.tensor([label])])[0] for label in range(len(p))]
    )
    exact = (p[:, None] * every.square()).sum(0)
    for s in range(2):
        assert found.fisher[s].sum() == pytest.approx(float(exact.sum()), rel=0.1)
        assert torch.corrcoef(torch.stack([found.fisher[s], exact]))[0, 1] > 0.99
    assert not torch.equal(found.fisher[0], found.fisher[1])  # each model draws for itself


def test_a_client_without_targets_or_with_infinite_gradients_fails_alone():
    model, structure = tiny.build("llama", torch.float64), structure_of("llama")
    good, bad = jobs(model, structure)
    empty = GradientMoments("empty", structure, good.first, good.second, [Encoded([3, 4], [False, False])])
    bad = GradientMoments("bad", structure, bad.first.like(bad.first.row * float("nan")), bad.second, bad.examples)
    found = evidence(AdaptedModel(model, structure), [empty, good, bad])
    assert isinstance(found[0], ClientError) and "no example has a target token" in str(found[0])
    assert isinstance(found[2], ClientError) and "client bad" in str(found[2])
    (alone,) = evidence(AdaptedModel(model, structure), [good])
    torch.testing.assert_close(found[1].fisher, alone.fisher, rtol=0, atol=1e-10)


def test_half_precision_keeps_small_gradients():
    model, structure = tiny.build("llama"), structure_of("llama")
    asked = []
    for job in jobs(model, structure):
        state = job.first.like(job.first.row.float())
        asked.append(GradientMoments(job.site, structure, state, state, job.examples))
    full = evidence(AdaptedModel(model, structure), asked)
    half = evidence(AdaptedModel(model, structure, autocast=torch.bfloat16), asked)
    for one, other in zip(full, half, strict=True):
        assert float(other.fisher.sum()) == pytest.approx(float(one.fisher.sum()), rel=0.1)


# Of sites


@pytest.mark.parametrize("kind", MAKERS)
def test_losses_and_logits(kind, monkeypatch):
    """In evaluation mode, in chunks, under several states one after another."""
    monkeypatch.setattr("llm_fed.engine.whole.CHUNK", 4)
    base, examples = MAKERS[kind](), BATCHES[0] + BATCHES[2]
    site = tiny_images.party(base, examples)
    states = [site.initial(), site.initial("other")]
    engine = Engine(base)
    losses = tiny_images.answer(engine, site.losses_of(states))
    for state, loss in zip(states, losses, strict=True):
        module = loaded(base, state).eval()
        with torch.no_grad():
            assert loss == pytest.approx(float(cross_entropy(base, module, examples)), abs=1e-12)
            output = module(pixel_values=base.prepare(torch.stack([picture.pixels for picture in examples])))
        found = tiny_images.answer(engine, site.logits(state, examples))
        torch.testing.assert_close(found, getattr(output, "logits", output), rtol=0, atol=1e-12)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("kind", MAKERS)
def test_the_gradient_of_images_is_autograd(kind):
    """Without dropout, on running statistics, and no remains of the call before."""
    base = MAKERS[kind]()
    site = tiny_images.party(base, BATCHES[0])
    engine, state = Engine(base), site.initial()
    for examples in (BATCHES[2], BATCHES[0]):
        loss, gradient = tiny_images.answer(engine, site.gradient(state, examples))
        module = loaded(base, state).eval().requires_grad_(True)
        expected = cross_entropy(base, module, examples)
        expected.backward()
        assert loss == pytest.approx(expected.item(), abs=1e-12)
        assert_state(State(gradient.layout, gradient.row), {n: p.grad for n, p in module.named_parameters()})
    assert gradient.row.abs().max() > 1e-3


@pytest.mark.parametrize("kind, structure", [("cnn", Full()), ("resnet", Full()), ("vit", LORA)])
def test_the_gradient_under_another_head(kind, structure):
    """The body's gradient is that of a model with the other head; its own head has none."""
    base, examples = MAKERS[kind](), tiny_images.pictures(7, classes=6)
    site = tiny_images.party(base, examples, structure=structure)
    site.data = replace(site.data, num_labels=6)
    engine, state = Engine(base), site.initial()
    head = site.new_head(state)
    assert {name: (tuple(value.shape), float(value.abs().max())) for name, value in head.tensors().items()} == {
        "weight": ((6, base.model.get_submodule(base.head).in_features), 0.0), "bias": ((6,), 0.0)
    }  # fmt: skip
    assert tiny_images.answer(engine, site.gradient(state, examples, head=head))[0] == pytest.approx(1.791759469)
    head = head.like(torch.randn(head.row.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    loss, gradient = tiny_images.answer(engine, site.gradient(state, examples, head=head))
    module: nn.Module = loaded(base, state) if structure == Full() else stock(base, state).base_model.model
    module.eval()
    if structure == Full():
        module.requires_grad_(True)
    entries = {
        name.removesuffix(".default.weight"): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not name.startswith(base.head)
    }
    linear = nn.Linear(*reversed(head["weight"].shape)).double()
    linear.load_state_dict(head.tensors())
    parent, _, last = base.head.rpartition(".")
    setattr(module.get_submodule(parent), last, linear)
    expected = cross_entropy(base, module, examples)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-12)
    assert_state(gradient.pick([*entries]), {name: p.grad for name, p in entries.items()})
    assert [name for name in gradient if name not in entries] == [f"{base.head}.weight", f"{base.head}.bias"]
    assert all(not gradient[name].any() for name in gradient if name not in entries)


def test_the_gradient_of_text_is_autograd(monkeypatch):
    """Per target token, over several micro-batches."""
    base, structure = federation.language_base(), federation.STRUCTURE
    examples = tiny.examples(0, [9, 4, 17, 6, 12, 5])
    site = Server("server", structure, LocalConfig(), 0, lambda g: draw(base.model, structure, g, torch.float64))
    state = site.initial()
    state = state.like(state.row + 0.1)
    wrapped = tiny.stock_peft(base.model, structure, state).eval()
    total, count = torch.zeros(()), 0
    for example in examples:
        ids, target = torch.tensor([example.input_ids]), torch.tensor(example.target)[1:]
        logits = wrapped(input_ids=ids).logits[0, :-1][target].float()
        total = total + nn.functional.cross_entropy(logits, ids[0, 1:][target], reduction="sum")
        count += int(target.sum())
    (total / count).backward()
    expected = {name: parameter.grad for name, parameter in tiny.peft_entries(wrapped).items()}
    for budget in (None, 30):
        engine = Engine(base, EvalConfig())
        engine.budget = budget
        loss, gradient = tiny_images.answer(engine, site.gradient(state, examples))  # type: ignore[arg-type]
        assert loss == pytest.approx((total / count).item(), abs=1e-6)  # logits are float32
        assert_state(gradient, expected, 1e-7)
        assert gradient.row.abs().max() > 1e-3


@pytest.mark.parametrize("asked", ["logits", "gradient"])
def test_texts_have_no_classes(asked):
    """A method that asks a language model for what a classifier answers is told so."""
    base, structure = federation.language_base(), federation.STRUCTURE
    site = Server("server", structure, LocalConfig(), 0, lambda g: draw(base.model, structure, g, torch.float64))
    head = State.of({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    state, examples = site.initial(), tiny.examples(0, [5])
    work = site.logits(state, examples) if asked == "logits" else site.gradient(state, examples, head=head)
    with pytest.raises(UserError, match="choose another base or method"):
        tiny_images.answer(Engine(base, EvalConfig()), work)
