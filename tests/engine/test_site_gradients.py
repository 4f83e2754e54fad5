"""Losses, logits and gradients, of image models and of language models, against autograd."""

from dataclasses import replace

import pytest
import tiny
import tiny_images
import torch
from tiny_images import BATCHES, LORA, MAKERS, assert_state, cross_entropy, loaded, stock
from torch import nn

from llm_fed.basics.errors import UserError
from llm_fed.engine.engine import Engine
from llm_fed.method.server import Server
from llm_fed.models.lora import draw
from llm_fed.models.structure import Full
from llm_fed.settings.config import EvalConfig, LocalConfig
from llm_fed.state import State
from llm_fed.testing import federation


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
