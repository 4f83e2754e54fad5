"""Models and examples so small that a federation of them takes a second: random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from llm_fed.kinds.images import Images
from llm_fed.kinds.language import Language
from llm_fed.models.images import ARCHITECTURES, head_of
from llm_fed.tasks.common import Encoded, Picture

VOCABULARY = 61
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>"}
HEADS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # far from linear, so that every part of the model matters
}
CLASSES = 4  # of pictures


def drawn(make: Callable[[], Any], seed: int) -> Any:
    """What `make` returns, a model with random weights, from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def llama(**changes: Any) -> LlamaForCausalLM:
    """Two layers."""
    return LlamaForCausalLM(LlamaConfig(**{**HEADS, "tie_word_embeddings": True, **changes}))


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per word: <pad> is 0, </s> is 1, then w2, w3, ..."""
    words = ["<pad>", "</s>", *(f"w{i}" for i in range(2, VOCABULARY))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def language_base(model: PreTrainedModel, name: str = "tiny", autocast: torch.dtype | None = None) -> Language:
    """A base of a model that is here already."""
    return Language(model=model, tokenizer=tokenizer(**SPECIAL), name=name, dtype=model.dtype, autocast=autocast)


def answers(client: int, size: int) -> list[Encoded]:
    """Two random words are answered with two words that are this client's own, and EOS."""
    draws = torch.Generator().manual_seed(client)
    prompts = torch.randint(2, VOCABULARY, (size, 2 + client), generator=draws).tolist()
    answer = [10 + client, 20 + client, 1]
    return [Encoded([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for prompt in prompts]


def architecture(name: str, dtype: torch.dtype = torch.float64) -> Images:
    """A base of an architecture that `base.name` knows (cnn, resnet-9, ...)."""
    model, names = drawn(lambda: ARCHITECTURES[name](CLASSES), 1), tuple(f"class {label}" for label in range(CLASSES))
    return Images(model=model.to(dtype).eval(), name=name, labels=names, size=32, head=head_of(model), dtype=dtype)


def arrays(count: int, seed: int = 0, classes: int = CLASSES, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """(N, size, size, 3) uint8 and (N,): each class is a coarse pattern of its own under as much noise."""
    patterns = np.random.default_rng(7).integers(0, 256, (classes, 4, 4, 3)).repeat(size // 4, 1).repeat(size // 4, 2)
    draws = np.random.default_rng(seed)
    labels = draws.permutation(count) % classes
    noise = draws.integers(0, 256, (count, size, size, 3))
    return ((patterns[labels] + noise) // 2).astype(np.uint8), labels


def pictures(count: int, seed: int = 0, classes: int = CLASSES, size: int = 32) -> list[Picture]:
    """The pictures of `arrays`, each (3, size, size)."""
    pixels, labels = arrays(count, seed, classes, size)
    tensors = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return [Picture(image, int(label), str(label)) for image, label in zip(tensors, labels, strict=True)]


def pictures_of(client: int, size: int) -> list[Picture]:
    """Of two of four classes, of which the next client holds one, too."""
    drawn = pictures(6 * size + 6, seed=client)
    return [picture for picture in drawn if picture.label in (client, client + 1)][:size]
