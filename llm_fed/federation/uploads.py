"""What the server receives: what arrives in a round, and the checks that each upload passes before a method sees it."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from llm_fed.federation.privacy import central
from llm_fed.federation.progress import Progress
from llm_fed.messages.outline import Skeleton, difference, skeleton
from llm_fed.messages.wire import WireError
from llm_fed.method import Upload
from llm_fed.runs.folder import Run, log_event
from llm_fed.runs.rows import Row
from llm_fed.state import State


def flaws(contents: list[Any], expected: list[Any], bound: float | None) -> list[str]:
    """Per upload what is wrong with it, in words; empty where nothing is.

    Args:
        contents: the uploads' messages, or why there is none.
        expected: the skeleton that each should have.
        bound: the largest norm, as a multiple of the median over those uploads given here that are otherwise without
            flaw; None: norms are not compared. The median is that of one round's arrivals, late ones among them: an
            upload that arrives alone is its own median and is never refused for its norm, and of two one is refused
            only where `bound` is below 2. Norms of 0 are left out of it: where most clients change nothing, who does
            is compared with the others who do.
    """
    found = [
        str(content) if isinstance(content, WireError) else difference(skeleton(content), wanted, "upload")
        for content, wanted in zip(contents, expected, strict=True)
    ]
    norms = {k: _norm(content) for k, content in enumerate(contents) if not found[k]}
    usual = [norm for norm in norms.values() if 0 < norm < math.inf]
    median = statistics.median(usual) if usual else math.inf
    for k, norm in norms.items():
        if not math.isfinite(norm):
            found[k] = "it holds NaN or infinite values, or its norm overflows"
        elif bound is not None and norm > bound * median:
            found[k] = f"its norm {norm:.3g} is over {bound:g} times the median {median:.3g} of this round (norm_bound)"
    return found


def _decoded(row: Row, expected: Skeleton) -> Any:
    """The message; a WireError in its place where it is none, or not as expected."""
    try:
        return row.message(expected)
    except WireError as error:
        return error


def _norm(message: Any) -> float:
    """Euclidean norm over every floating number in a message."""
    if isinstance(message, State):
        # Running statistics are in no norm, but where they are not finite, nothing is.
        finite = all(bool(torch.isfinite(value).all()) for value in message.extras.values())
        return message.norm() if finite else math.inf
    if isinstance(message, torch.Tensor):
        return float(torch.linalg.vector_norm(message.double())) if message.is_floating_point() else 0.0
    if isinstance(message, dict | list | tuple):
        items = message.values() if isinstance(message, dict) else message
        return math.hypot(*(_norm(item) for item in items))
    return abs(message) if isinstance(message, float) else 0.0


def arrivals(run: Run, progress: Progress, record: dict[str, Any]) -> list[Upload]:
    """Take what is due off its way, in the order (arrival, client), and refuse what is not as it should be."""
    due = sorted(
        (item for item in progress.in_flight if item.arrival <= progress.round),
        key=lambda item: (item.arrival, item.client),
    )
    progress.in_flight = [item for item in progress.in_flight if item.arrival > progress.round]
    contents = [_decoded(item.content, item.expected) for item in due]
    # Whether an upload is refused must not depend on the others where their sum is to hide each of them.
    bound = None if central(run.config.privacy) else run.config.norm_bound
    found = flaws(contents, [item.expected for item in due], bound)
    for item, flaw in zip(due, found, strict=True):
        if flaw:
            log_event(run, progress.round, item.client, "refused upload", flaw)
    uploads = [
        Upload(item.client, item.num_examples, progress.round - item.asked, content)
        for item, content, flaw in zip(due, contents, found, strict=True)
        if not flaw
    ]
    record |= {"arrived": len(uploads), "refused": record.get("refused", 0) + len(due) - len(uploads)}
    return uploads
