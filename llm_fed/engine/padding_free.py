"""Training without padding: whether a base and its clients' fits can be trained on sequences that lie end to end.

A base is compared, not trusted: a few sequences go through it side by side and end to end, once, and where it predicts
otherwise it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.end_to_end import LENGTH, WINDOW, Unsupported, attention, flattened, has_kernels, windowed
from llm_fed.engine.examples import TEXT
from llm_fed.engine.laid import on_device
from llm_fed.engine.memory import out_of_memory
from llm_fed.method.requests import Fit
from llm_fed.models.frozen import freeze
from llm_fed.models.rotary import regimes
from llm_fed.tasks.common import Encoded

log = logging.getLogger(__name__)

LENGTHS = (9, 2, 14, 5)  # tokens of the sequences that are compared
SHORT = 4  # tokens of the shortest window while bases are compared
APART = 1e-3  # most that predictions may differ, as a share of how they vary
APART_IN_HALF = 0.1  # the same in 16 bits; where tokens see another sequence they differ by about 1

_compared: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


class PaddingFree:
    """What `engine.padding_free` asks for, for all fits of an engine.

    Args:
        forced: what cannot be trained so is refused, or said; otherwise it is trained in rows.

    Attributes:
        said: why fits have been trained in rows though it was forced, one line for each reason.
    """

    def __init__(self, forced: bool = True) -> None:
        self._forced = forced
        self.said: dict[str, None] = {}

    def check(self, model: AdaptedModel, *, private: bool = False) -> None:
        """Refuse what can never be trained so.

        Args:
            private: whether the gradients of single examples are asked for.

        Raises:
            UserError: why, and what to set.
        """
        if why := never(model, private=private):
            raise UserError(f"engine.padding_free=on, but {why}; set engine.padding_free=auto, which pads there")

    def in_rows(self, model: AdaptedModel, jobs: Sequence[Fit]) -> str:
        """Why these fits are trained in rows with padding; empty where they need not be.

        Raises:
            UserError: as `check`, where it was forced.
        """
        private = jobs[0].private is not None
        if self._forced:
            self.check(model, private=private)
        elif why := never(model, private=private):
            return why
        why = "teachers answer for each example" if jobs[0].teachers else _no_kernels(model.device)
        if why and self._forced and why not in self.said:
            self.said[why] = None
            log.warning("texts are trained in rows with padding: %s", why)
        return why

    def reads(self, model: AdaptedModel) -> bool:
        """Whether prompts are read so, too: where it is forced, as no GPU has tried it yet."""
        return self._forced and not refusal(model) and not _no_kernels(model.device)


def _no_kernels(device: torch.device) -> str:
    """What a GPU lacks, in words."""
    if device.type != "cuda" or has_kernels(device):
        return ""
    return f"torch {torch.__version__} has no kernels for them end to end on this GPU (2.11 has, from Ampere on)"


def never(model: AdaptedModel, *, private: bool) -> str:
    """Why fits with these adapters can never be trained so; empty where they can."""
    if private:
        return "privacy.unit=example needs the gradients of single examples, which lie in rows of their own"
    return refusal(model)


def refusal(model: AdaptedModel) -> str:
    """Why adapters of this structure on this base cannot be trained on sequences end to end; empty where they can."""
    structure, base = model.structure, model.model
    if not getattr(structure, "fused", False):
        return "whole models are trained"
    for why, holds in {
        "only texts can lie end to end, and not pictures, labels or preferences": not model.examples.fixed,
        "a head is trained whole beside the adapters": bool(structure.whole),
        "the experts of a mixture have adapters (adapter.target_parameters)": bool(structure.parameters),
        "the method adds frozen weights beneath the adapters": structure.delta,
        "the base lies on several devices": len(set(getattr(base, "hf_device_map", {}).values())) > 1,
    }.items():
        if holds:
            return why
    if base not in _compared:
        _compared[base] = _of_base(model)
    return _compared[base]


def _of_base(model: AdaptedModel) -> str:
    base: Any = model.model
    config = base.config.get_text_config()
    if getattr(base, "is_quantized", False) or getattr(base, "quantization_method", None):
        return "the base is quantised, and nobody has compared what that rounds"
    if regimes(base) is not None:
        return "the base's positions depend on the length of each text"
    if kinds := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", WINDOW}):
        return f"the base has layers without full attention ({', '.join(kinds)})"
    return compared(model)


@torch.no_grad()
def compared(model: AdaptedModel) -> str:
    """Why a base predicts otherwise when sequences lie end to end, in words; empty where it does not."""
    freeze(model.model)
    model_as_it_is: Any = model.model
    words = model_as_it_is.get_input_embeddings().num_embeddings
    draws = generator(0, "padding free")
    several = [
        Encoded(torch.randint(0, words, (length,), generator=draws).tolist(), [True] * length) for length in LENGTHS
    ]
    base = f"the base ({type(model.model).__name__})"
    batch = on_device(TEXT.collate(several), model.device)
    windows = windowed(model.model)
    try:
        with model.computing(), windows_of(SHORT, model.model) if windows else nullcontext():
            rows = TEXT.logits(model.model, batch)
            with attention(model.model):
                flat = TEXT.logits(model.model, on_device(flattened(several), model.device))
        if windows:
            with model.computing(), windows_of(2 * SHORT, model.model):
                longer = TEXT.logits(model.model, batch)
            if torch.equal(rows, longer):
                return f"{base} has windows of attention whose length cannot be set, so that nobody can compare them"
    except Unsupported as error:
        return f"{base} wants {error}"
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        return f"{base} does not take it: {' '.join(str(error).split())[:200]}"
    differ = float((flat - rows).double().norm() / (rows - rows.mean(0)).double().norm().clamp_min(1e-300))
    dtype = model.autocast or next(model.model.parameters()).dtype
    if not differ <= (APART if dtype.itemsize > 2 else APART_IN_HALF):
        return f"{base} predicts otherwise where sequences lie end to end (by {differ:.2g} of what predictions vary)"
    return ""


@contextmanager
def windows_of(tokens: int, model: nn.Module) -> Iterator[None]:
    """Within, the shortest window of a base's attention has so many tokens: sequences that are shorter than a window
    would prove nothing about it. All change by the same number, so that one which is counted otherwise still is."""
    holders = {id(each): each for module in model.modules() for each in (module, getattr(module, "config", None))}
    before = [(each, length) for each in holders.values() if type(length := getattr(each, LENGTH, None)) is int]
    more = tokens - min((length for _, length in before), default=tokens)
    try:
        for each, length in before:
            setattr(each, LENGTH, length + more)
        yield
    finally:
        for each, length in before:
            setattr(each, LENGTH, length)


def in_words(asked: PaddingFree | None, device: torch.device) -> str:
    """What a run makes of texts, where that is no matter of course: for people."""
    if asked is None:
        return ""
    if device.type == "cuda":
        return "none, where the base and the task allow it (engine.padding_free)"
    return f"without padding (engine.padding_free=on), a product per client and an attention per text on {device}"
