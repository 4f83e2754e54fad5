"""Threads of one process take turns at models: one at a time loads, trains or answers, and a run has its turn to its
end.

While transformers loads a model it changes what all threads share: torch's default dtype, torch's functions that draw
weights, and whether weights are tied. What another thread computes meanwhile could silently become something else.

A turn also gives its thread the settings of torch that all of this package counts on, whatever the program around it
has chosen, and gives that its own back in the end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from llm_fed.basics.errors import printable

_SOON = 2.0  # seconds after which a thread that waits says so

Note = Callable[[str], None]

_turn = threading.Lock()
_owner: int | None = None  # the number of the thread that has it


def _print(text: str) -> None:
    print(f"llm-fed: {printable(text)}", file=sys.stderr)


@contextmanager
def taken(note: Note = _print) -> Iterator[None]:
    """Within, no other thread loads, trains or answers. A thread that has the turn may take it again. `note` is told
    where another thread has had the turn for two seconds."""
    global _owner
    if _owner == threading.get_ident():
        yield
        return
    if not _turn.acquire(timeout=_SOON):
        note("waiting for another thread of this process, which is loading, training or answering")
        _turn.acquire()
    _owner, dtype = threading.get_ident(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as usual:
            if torch.get_default_device().type != "cpu":  # a mode that every call of torch passes through
                usual.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)
        _owner = None
        _turn.release()
