"""Losses that are had from the inputs of the last layer are those of the logits, for every family of transformers, and
no pass holds the logits of all targets."""

import every_family
import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from llm_fed.engine import examples
from llm_fed.engine.examples import TEXT
from llm_fed.engine.packing import collate
from llm_fed.method import losses
from llm_fed.method.losses import head_losses
from llm_fed.models.base import freeze
from llm_fed.models.families import check_family
from llm_fed.tasks.common import Encoded
from llm_fed.testing.tiny import llama

TEXTS = [Encoded([3, 4, 5, 6, 7, 8][:size], [False, True, False, True, True, True][:size]) for size in (6, 4, 5)]
PLAIN = ("llama", "gpt2", "phi")  # of the last the head has a bias
CHANGED = ("gemma2", "granite", "cohere")  # by a tanh and by scales


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_values_and_gradients_are_those_of_the_logits(dtype, tolerance, bias, monkeypatch):
    monkeypatch.setattr(losses, "_ROWS", 4)  # so that 13 need several parts
    draws = torch.Generator().manual_seed(0)
    inputs, weight, b = (torch.randn(*shape, generator=draws).to(dtype) for shape in ((13, 8), (50, 8), (50,)))
    labels, upstream = torch.arange(13) * 3, torch.linspace(-1, 2, 13)
    ours, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()

    got = head_losses(ours, weight, b if bias else None, labels)
    logits = linear(theirs, weight, b if bias else None)
    wanted = cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), labels, reduction="none")
    got.backward(upstream.to(got))
    wanted.backward(upstream.to(wanted))

    assert got.dtype == wanted.dtype
    assert torch.allclose(got, wanted, rtol=0, atol=tolerance)
    assert torch.allclose(ours.grad.double(), theirs.grad.double(), rtol=0, atol=tolerance)
    assert torch.equal(head_losses(inputs, weight, b if bias else None, labels), got)  # without a gradient


def both(model):
    """Losses, and their gradients for the embeddings: as they are had, and of logits of all targets."""
    batch, seen = collate(TEXTS), []
    freeze(model)
    handle = model.get_input_embeddings().register_forward_hook(
        lambda layer, inputs, output: seen.append(output.detach().requires_grad_()) or 1 * seen[-1]
    )
    weights = torch.linspace(0.5, 2, len(batch.labels), dtype=torch.float64)
    found = []
    for of in (
        TEXT.token_losses,
        lambda *given: cross_entropy(TEXT.predictions(*given), batch.labels, reduction="none"),
    ):
        seen.clear()
        got = of(model, batch)
        (got * weights).sum().backward()
        found.append((got.detach(), seen[-1].grad))
    handle.remove()
    return found


def compare(family):
    """Whether the losses were had from the inputs of the last layer."""
    model = every_family.build(family)
    (loss, gradient), (wanted, their_gradient) = both(model)
    assert torch.allclose(loss, wanted, rtol=1e-10, atol=1e-10)
    assert torch.allclose(
        gradient, their_gradient, rtol=1e-8, atol=1e-10, equal_nan=True
    )  # of zero vectors, Gemma 3n's
    return examples.last_layer(model) is not None


@pytest.mark.parametrize("family", [*PLAIN, *CHANGED])
def test_a_family(family):
    assert compare(family) == (family in PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("family", every_family.FAMILIES)
def test_every_family(family):
    try:
        check_family(every_family.config_of(family), family)
        TEXT.predictions(every_family.build(family), collate(TEXTS))
    except Exception as error:
        pytest.skip(f"refused, or transformers cannot compute it so small and in float64: {error}")
    compare(family)


class Sizes(TorchDispatchMode):
    """The most numbers of a tensor that operations make; views of the model's own do not count."""

    def __init__(self, model):
        super().__init__()
        self.own, self.most = {parameter.data_ptr() for parameter in model.parameters()}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.data_ptr() not in self.own:
            self.most = max(self.most, made.untyped_storage().nbytes() // made.element_size())
        return made


def test_no_pass_holds_the_logits_of_all_targets(monkeypatch):
    monkeypatch.setattr(losses, "_ROWS", 2)
    model, batch = llama(vocab_size=4096, hidden_size=8, intermediate_size=8), collate(TEXTS)
    freeze(model)
    with Sizes(model) as sizes:
        TEXT.token_losses(model, batch)
    assert sizes.most <= 2 * 4096
    with Sizes(model) as sizes:
        TEXT.losses_of(TEXT.logits(model, batch), batch)
    assert sizes.most >= len(batch.labels) * 4096


@pytest.mark.parametrize("why", ["a hook listens", "it is trained", "it computes in another dtype", "a replacement"])
def test_logits_are_computed_where(why):
    model = llama()
    freeze(model)
    head = model.get_output_embeddings()
    assert examples.last_layer(model)
    if why == "a hook listens":
        head.register_forward_hook(lambda *given: None)
    if why == "it is trained":
        head.weight.requires_grad_()
    if why == "a replacement":
        head.forward = head.forward
    with torch.autocast("cpu", torch.bfloat16, enabled=why == "it computes in another dtype"):
        assert examples.last_layer(model) is None
