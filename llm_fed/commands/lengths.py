"""Which lengths of examples a run should have room for: nearly all, but not the few that are far out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

BLOCK = 32  # tokens that a length is rounded up to
FAR = 4  # times as long as nine of ten examples: beyond this an example is far out
FEW, FAR_OF_FEW = 10, 10  # of fewer examples one may well be a little longer
LITTLE = 1.5  # times as long as 99 of 100 examples: so much room is given to the longest
MOST = 5  # examples of a client from which on it is known how long they are


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompt and answer together, and of the answer alone, of a sample of each client's examples; and what
    is not read as it stands, in words."""

    clients: Mapping[str, Sequence[tuple[int, int]]]
    note: str = ""

    @property
    def whole(self) -> list[int]:
        """Tokens of prompt and answer, of all clients, sorted."""
        return sorted(whole for pairs in self.clients.values() for whole, _ in pairs)

    def limits(self, context: int | None) -> LengthLimits:
        """What to set.

        Args:
            context: tokens that the base takes at most, if that is known.
        """
        most = context or self.whole[-1] + BLOCK
        longest = min(most, up_to_block(usual_length(self.whole)))
        raised = None
        for client, pairs in self.clients.items():
            own = [whole for whole, _ in pairs]
            if len(own) >= MOST and median(own) > longest and longest < most:
                longest, raised = min(most, up_to_block(usual_length(own))), client
        answers = sorted(answer for pairs in self.clients.values() for whole, answer in pairs if whole <= longest)
        lost = {
            client: (sum(whole > longest for whole, _ in pairs), len(pairs)) for client, pairs in self.clients.items()
        }
        answer = min(longest, up_to_block(usual_length(answers) + 1)) if answers else longest
        return LengthLimits(longest, answer, raised, {client: (of, all) for client, (of, all) in lost.items() if of})


@dataclass(frozen=True)
class LengthLimits:
    """Largest lengths in tokens.

    Attributes:
        longest: of prompt and answer together.
        answer: of an answer.
        raised: the client for whose examples `longest` is larger than for those of all.
        skipped: by client that has any: how many of the sample are longer, and of how many.
    """

    longest: int
    answer: int
    raised: str | None
    skipped: Mapping[str, tuple[int, int]]


def usual_length(values: Sequence[int]) -> int:
    """The longest of the sorted values that is not far out.

    Nine of ten values set the scale; of few values the longest never does, as it may be the one that is wrong.
    """
    scale = values[math.floor(0.9 * (len(values) - 1))]
    far = FAR if len(values) >= FEW else FAR_OF_FEW
    near = [value for value in values if value <= far * scale]
    nearly = quantile(near, 0.99)
    return near[-1] if near[-1] <= LITTLE * nearly else nearly


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest of the sorted values that at least this share of them does not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def up_to_block(tokens: int) -> int:
    """Up to a multiple of BLOCK."""
    return BLOCK * math.ceil(tokens / BLOCK)
