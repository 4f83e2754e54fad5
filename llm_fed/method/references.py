"""What a reference makes of a site's preferences: the log-likelihoods that DPO, IPO and KTO compare the model's with.

Of the frozen base they are found once for each training example, in chunks of neighbours: the numbers then depend on
the data alone, and not on which examples were requested first, so that a run that continues computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llm_fed.method.requests import LogLikelihoods
from llm_fed.models.structure import Structure
from llm_fed.state import State

if TYPE_CHECKING:
    from llm_fed.method.site import Site

CHUNK = 8  # examples of which the base is asked together
LAST = (
    "reference"  # key of a site's `memory`, before the number of the fit: the model with which it ended its last round
)


async def against_base(site: Site, examples: Sequence[Any]) -> Sequence[Any]:
    """The examples with what the frozen base makes of them; as they are where nothing is compared with a reference."""
    if not site.objective.refers or not examples:
        return examples
    found = await LogLikelihoods(site.id, site.structure, None, list(examples))
    return [replace(example, reference=own) for example, own in zip(examples, found, strict=True)]


async def against(
    site: Site,
    examples: Sequence[Any],
    used: Sequence[int],
    state: State,
    structure: Structure,
    mix: tuple[float, ...] | None,
    nth: int,
) -> list[Any]:
    """Those of the examples that a fit uses, with what the reference of `objective.reference` makes of them.

    Args:
        used: their indices.
        state: with which the fit begins.
        nth: the number of the fit in this round.
    """
    chosen = [examples[index] for index in used]
    if not chosen:
        return chosen
    if site.objective.reference == "base":
        known = await _of_base(site, examples, used)
    else:
        model = state
        if site.objective.reference == "last" and (key := f"{LAST} {nth}") in site.memory:
            last = site.memory[key]
            model = last if last.layout == state.layout else state
        known = await LogLikelihoods(site.id, structure, model, chosen, mix)
    return [replace(example, reference=own) for example, own in zip(chosen, known, strict=True)]


async def _of_base(site: Site, examples: Sequence[Any], used: Sequence[int]) -> list[tuple[float, ...]]:
    known = site.of_base if examples is site.train else {}
    chunks = sorted({index // CHUNK for index in used if index not in known})
    indices = [index for chunk in chunks for index in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(examples)))]
    if indices:
        requested = [examples[index] for index in indices]
        found = await LogLikelihoods(site.id, site.structure, None, requested, chunk=CHUNK)
        known.update(zip(indices, found, strict=True))
    return [known[index] for index in used]
