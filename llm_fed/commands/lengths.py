"""Which lengths of examples a run should have room for: nearly all, but not the few that are far out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from llm_fed.basics.errors import listed

BLOCK = 32  # tokens that a length is rounded up to
FAR = 4  # times as long as nine of ten examples: beyond this an example is far out
FEW, FAR_OF_FEW = 10, 10  # of fewer examples one may well be a little longer
LITTLE = 1.5  # times as long as 99 of 100 examples: so much room is given to the longest
MOST = 5  # examples of a client from which on it is known how long they are
SHOWN = 6  # clients in a line


@dataclass(frozen=True)
class LengthLimits:
    """Largest lengths in tokens.

    Attributes:
        longest: of prompt and answer together.
        answer: of an answer.
        raised: the client for whose examples `longest` is larger than for those of all.
        skipped: by client that has any: how many are longer.
    """

    longest: int
    answer: int
    raised: str | None
    skipped: Mapping[str, int]

    def warnings(self, measured: int) -> list[str]:
        """What the largest length costs of so many examples, and whom."""
        if not self.skipped:
            return []
        most = sorted(self.skipped.items(), key=lambda item: -item[1])
        by_client = listed([f"{count} of {id}" for id, count in most], SHOWN)
        return [
            f"{sum(self.skipped.values())} of {measured} examples are longer than task.max_length={self.longest} and "
            f"will be skipped: {by_client}; task.too_long=cut-start keeps the ends of their prompts instead"
        ]


def limits(clients: Mapping[str, Sequence[tuple[int, int]]], context: int | None) -> LengthLimits:
    """What to set for examples by client, each with its tokens of prompt and answer, and of the answer alone.

    Args:
        context: tokens that the base takes at most, if that is known.
    """
    whole = sorted(length for pairs in clients.values() for length, _ in pairs)
    most = context or whole[-1] + BLOCK
    longest, raised = min(most, up_to_block(usual_length(whole))), None
    for client, pairs in clients.items():
        own = sorted(length for length, _ in pairs)
        if len(own) >= MOST and median(own) > longest and longest < most:
            longest, raised = min(most, up_to_block(usual_length(own))), client
    answers = sorted(answer for pairs in clients.values() for length, answer in pairs if length <= longest)
    skipped = {client: sum(length > longest for length, _ in pairs) for client, pairs in clients.items()}
    answer = min(longest, up_to_block(usual_length(answers) + 1)) if answers else longest
    return LengthLimits(longest, answer, raised, {client: count for client, count in skipped.items() if count})


def usual_length(values: Sequence[int]) -> int:
    """The longest of the sorted values that is not far out.

    Nine of ten values set the scale; of few values the longest never does, as it may be the one that is wrong.
    """
    scale = values[math.floor(0.9 * (len(values) - 1))]
    far = FAR if len(values) >= FEW else FAR_OF_FEW
    near = [value for value in values if value <= far * scale]
    nearly = near[max(0, math.ceil(0.99 * len(near)) - 1)]
    return near[-1] if near[-1] <= LITTLE * nearly else nearly


def up_to_block(tokens: int) -> int:
    """Up to a multiple of BLOCK."""
    return BLOCK * math.ceil(tokens / BLOCK)
