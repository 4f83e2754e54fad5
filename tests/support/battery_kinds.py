"""What the federations of the battery train: adapters of a LLaMA of two layers, or whole ResNets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import tiny
import tiny_base
import tiny_images
import tiny_rounds
import torch

from llm_fed.config import EvalConfig, LocalConfig
from llm_fed.engine.images import VisionEngine
from llm_fed.engine.language import LanguageEngine
from llm_fed.models.loading import Base
from llm_fed.models.lora import Lora, draw
from llm_fed.models.structure import Full, Structure
from llm_fed.tasks.common import Encoded, Picture

OF_PICTURES = " of pictures"  # ends the names of federations of whole image models
STRUCTURE = Lora(rank=2, alpha=8, dropout=0.0, target_modules=("q_proj", "v_proj"))
LOCAL = LocalConfig(steps=3, batch_size=2, lr=0.05)


@cache
def base() -> Base:
    return tiny_base.around(tiny.build("llama", torch.float64))


def examples(client: int, size: int) -> list[Encoded]:
    """Two random words are answered with two words that are this client's own, and EOS."""
    draws = torch.Generator().manual_seed(client)
    prompts = torch.randint(2, tiny.VOCABULARY, (size, 2 + client), generator=draws).tolist()
    answer = [10 + client, 20 + client, 1]
    return [Encoded([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for prompt in prompts]


def pictures(client: int, size: int) -> list[Picture]:
    """Of two of four classes, of which the next client holds one, too."""
    found = tiny_images.pictures(6 * size + 6, seed=client)
    return [picture for picture in found if picture.label in (client, client + 1)][:size]


@dataclass(frozen=True)
class Kind:
    """What a federation trains, and on what."""

    base: Callable[[torch.dtype], Any]
    structure: Structure
    local: LocalConfig
    draw: Callable[..., Any]  # of (base, structure, dtype, generator)
    engine: Callable[[Any], Any]
    examples: Callable[[int, int], list[Any]]
    falls: float  # by how much the loss falls at least, from the first round to the last
    least: int  # bytes of a message

    @staticmethod
    def of(name: str) -> Kind:
        return PICTURES if name.endswith(OF_PICTURES) else TEXTS


TEXTS = Kind(
    lambda dtype: base() if dtype == torch.float64 else tiny_base.around(tiny.build("llama", dtype)), STRUCTURE, LOCAL,
    lambda base, structure, dtype, generator: draw(base.model, structure, generator, dtype=dtype),
    lambda base: LanguageEngine(base, LOCAL, EvalConfig()), examples, falls=0.3, least=1000,
)  # fmt: skip
PICTURE_LOCAL = LocalConfig(steps=3, batch_size=4, lr=0.003, optimizer="adam")
PICTURES = Kind(
    cache(lambda dtype: tiny_rounds.base_of("resnet-9", dtype)), Full(), PICTURE_LOCAL,
    lambda base, structure, dtype, generator: base.draw(structure, generator),
    lambda base: VisionEngine(base, PICTURE_LOCAL), pictures, falls=0.02, least=100,
)  # fmt: skip
