"""The beginning that prompts of one adapter have in common (a template, a system prompt) is read once per batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import commonprefix

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

WORTH = 0.2  # of all prompts' tokens: what must be saved for the further pass per batch, and the padding, to pay

PromptRequest = tuple[int, Sequence[int]]  # row of the bank, token ids of the prompt


def shared_prefixes(config: PreTrainedConfig, requests: Sequence[PromptRequest]) -> dict[int, int]:
    """By row of the bank, how many tokens all its prompts begin with; at least the last token of each is left.

    Empty where too few tokens would be saved, and where a layer remembers a window or a state instead of all tokens:
    the padding between a prefix and what follows would shift what that layer sees.
    """
    prompts = defaultdict[int, list[list[int]]](list)
    for row, prompt in requests:
        prompts[row].append(list(prompt))
    shared = {
        row: min(len(commonprefix(of_row)), min(map(len, of_row)) - 1) if len(of_row) > 1 else 0
        for row, of_row in prompts.items()
    }
    saved = sum(length * (len(prompts[row]) - 1) for row, length in shared.items())
    worth = saved >= WORTH * sum(len(prompt) for _, prompt in requests)
    layers = DynamicCache(config=config).layers
    return shared if worth and saved and all(type(layer) is DynamicLayer for layer in layers) else {}


def ordered(requests: Sequence[PromptRequest], shared: Mapping[int, int]) -> list[int]:
    """Places of the requests: the longest first, and where prefixes are shared, those of one adapter together."""

    def key(i: int) -> tuple[int, int, int]:
        row, prompt = requests[i]
        return -shared.get(row, 0), row if shared else 0, -len(prompt)

    return sorted(range(len(requests)), key=key)


def batches(
    requests: Sequence[PromptRequest],
    sizes: Sequence[int],
    limit: Callable[[int], int],
    shared: Mapping[int, int],
    *,
    even: bool = False,
) -> Iterator[list[int]]:
    """Places of requests, `ordered`, in batches whose sizes add up to at most `limit`, or of one request; with `even`
    of prompts of one length.

    Args:
        limit: of batches whose longest prompt has so many tokens.
    """
    batch: list[int] = []
    longest = 0
    for i in ordered(requests, shared):
        length = len(requests[i][1])
        longest = max(longest, length)
        uneven = even and batch and length != len(requests[batch[0]][1])
        if uneven or (batch and sum(sizes[other] for other in batch) + sizes[i] > limit(longest)):
            yield batch
            batch, longest = [], length
        batch.append(i)
    if batch:
        yield batch
