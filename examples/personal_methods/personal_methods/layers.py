"""Which entries of a state are a model's last layers."""

from __future__ import annotations

import re

from llm_fed.basics.errors import UserError
from llm_fed.method import State


def last_layers(state: State, count: int) -> str:
    """A regular expression of the entries of the last `count` layers.

    A layer is a module with parameters, in the model's order: of whole image models a convolution, a normalisation or
    the head; of adapters one adapted matrix, whose A and B belong together.

    Raises:
        UserError: nothing would be left before them.
    """
    layers = list(dict.fromkeys(_layer_of(name) for name in state))
    if count >= len(layers):
        raise UserError(
            f"the last {count} layers of a model with {len(layers)} leave no layer to be shared; take fewer"
        )
    return rf"^(?:{'|'.join(map(re.escape, layers[-count:]))})\."


def others(pattern: str) -> str:
    """A regular expression of all entries that `pattern`, one of `last_layers`, does not match."""
    return rf"^(?!{pattern.removeprefix('^')})"


def _layer_of(entry: str) -> str:
    return entry.rpartition(".")[0]
