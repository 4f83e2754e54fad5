"""FlatModel: a module whose parameters lie in one row, so that a state goes in and out by one copy."""

from __future__ import annotations

import torch
from torch import nn

from llm_fed.state import Layout, State


class FlatModel:
    """A module around one row (P,) of parameters and one of gradients.

    The module's parameters become views of `row`, their gradients views of `grads`: loading a state, clipping,
    optimising and reading are then operations on rows. Floating buffers (BatchNorm statistics) are the extras of the
    states; integer ones (counters) stay in the module and never travel.

    Args:
        module: it is changed: from here on its parameters live in the row.
    """

    def __init__(self, module: nn.Module):
        self.module, self.parameters = module, dict(module.named_parameters())
        self.layout = Layout(tuple(self.parameters), tuple(tuple(p.shape) for p in self.parameters.values()))
        self.row = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters.values()])
        self.grads = torch.zeros_like(self.row)
        for name, parameter in self.parameters.items():
            span, shape = self.layout.slices[name], self.layout.shape_of[name]
            parameter.data = self.row[span].view(shape)
            parameter.requires_grad_(True)
            parameter.grad = self.grads[span].view(shape)
        self.buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}

    def load(self, state: State) -> None:
        """Put a state in. ValueError: it has other entries than the module."""
        if state.layout != self.layout or state.extras.keys() != self.buffers.keys():
            raise ValueError(f"the state's entries are not those of {type(self.module).__name__}")
        self.row.copy_(state.row)
        for name, buffer in self.buffers.items():
            buffer.copy_(state.extras[name])

    def read(self) -> State:
        """A copy of what is in, on the CPU."""
        return State(self.layout, self.row.cpu().clone(), {n: b.cpu().clone() for n, b in self.buffers.items()})
