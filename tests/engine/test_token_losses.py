"""The losses of tokens are those of PyTorch, to the bit, with less memory."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from llm_fed.method import losses
from llm_fed.method.losses import token_losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [0, 1, 13])
def test_values_and_gradients_are_pytorchs(number, dtype, monkeypatch):
    monkeypatch.setattr(losses, "_AT_ONCE", 2 * 300)  # two rows at once, so that 13 need several parts
    logits = torch.randn(number, 300, dtype=dtype, generator=torch.Generator().manual_seed(number)) * 4
    labels, weights = torch.arange(number) * 7, torch.linspace(-1, 2, number, dtype=dtype)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()

    got, wanted = token_losses(ours, labels), cross_entropy(theirs, labels, reduction="none")
    got.backward(weights)
    wanted.backward(weights)

    assert torch.equal(got, wanted)
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(token_losses(logits, labels), wanted)
    assert torch.equal(logits, ours)  # nobody's logits are written to


def large_tensors(loss_of, monkeypatch):
    """The operations that take memory for as much as the logits."""
    monkeypatch.setattr(losses, "_AT_ONCE", 2**12)
    logits = torch.randn(512, 4096, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss_of(logits, torch.zeros(512, dtype=torch.int64)).sum().backward()
    return {
        event.name for event in profile.events()
        if event.self_cpu_memory_usage >= logits.nbytes and event.name.startswith("aten::")
    }  # fmt: skip


def test_one_tensor_as_large_as_the_logits_is_made(monkeypatch):
    assert large_tensors(token_losses, monkeypatch) == {"aten::_log_softmax"}
    assert len(large_tensors(cross_entropy, monkeypatch)) > 1
