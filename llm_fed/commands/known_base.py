"""What is known of a base before a run: its configuration and its tokenizer, without waiting long for the Hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from llm_fed.basics.errors import UserError
from llm_fed.models.rotary import context

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

WAIT = 5.0  # seconds for the Hub's first answer

SMALL = 1024  # the hidden size below which a model learns with larger steps
# docs/results/desks.md has what was measured. Larger steps than MIDDLE were not tried with preferences or labels.
FAST, MIDDLE, SLOW = {"lr": 3e-3, "lr_end": 3e-4}, {"lr": 1e-3, "lr_end": 1e-4}, {"lr": 2e-4, "lr_end": 2e-5}

Tell = Callable[[str], None]


def rates_of(config: PretrainedConfig | None, *, answers: bool = True) -> dict[str, float]:
    """The `lr` and `lr_end` that `init` proposes for adapters of a base; the smallest where its width is unknown.
    `answers`: it learns to write answers, and neither preferences nor labels."""
    if getattr(config, "hidden_size", SMALL) >= SMALL:
        return SLOW
    return FAST if answers else MIDDLE


@dataclass(frozen=True)
class KnownBase:
    """Tokenizer and configuration of a base, or why they cannot be had here."""

    tokenizer: PreTrainedTokenizerBase | None = None
    config: PretrainedConfig | None = None
    problem: str = ""

    @property
    def context(self) -> int | None:
        return None if self.config is None else context(self.config)


def look_up(name: str, tell: Tell = lambda line: None) -> KnownBase:
    """Look at a folder, else at the Hub's cache on this machine, else at the Hub. UserError: it is a folder that holds
    no base, or no name of one. `tell`: hears that the Hub is asked, before it is."""
    from llm_fed.models import forms
    from llm_fed.models.loading import check_name

    folder_or_id = check_name(name)
    known = _read(name, folder_or_id, local=True)
    if known.problem and os.path.isdir(folder_or_id):
        raise UserError(known.problem)
    if known.problem:
        known = _from_hub(name, folder_or_id, tell)
    if known.config is not None:
        forms.check_quantization(name, known.config)
        known = KnownBase(known.tokenizer, known.config.get_text_config())
    return known


def _from_hub(name: str, id: str, tell: Tell) -> KnownBase:
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return KnownBase(problem="it is not in the cache of this machine, and HF_HUB_OFFLINE is set")
    tell(f"looking up {name} on the Hub; it has {WAIT:.0f} s to answer (--base FOLDER needs no network)")
    try:
        huggingface_hub.HfApi().model_info(id, timeout=WAIT)
    except HfHubHTTPError:
        pass  # it answers, and whoever reads says what is wrong
    except Exception as error:  # those of httpx
        host, why = huggingface_hub.constants.ENDPOINT, str(error) or type(error).__name__
        return KnownBase(problem=f"it is not in the cache of this machine, and {host} cannot be reached ({why})")
    return _read(name, id, local=False)


def _read(name: str, folder_or_id: str, *, local: bool) -> KnownBase:
    from llm_fed.models.loading import explain, read_settings, read_words  # seconds

    try:
        config, tokenizer = read_settings(folder_or_id, local=local), read_words(folder_or_id, local=local)
    except Exception as error:  # transformers and tokenizers share no class of errors
        if os.path.isdir(folder_or_id):
            return KnownBase(problem=explain(name, error, "a causal LM"))
        return KnownBase(problem=" ".join(str(error).split())[:200])
    return KnownBase(tokenizer, config)
