"""What the server receives: what arrives in a round, and the checks that each upload passes before a method sees it."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from llm_fed.federation.privacy import central
from llm_fed.federation.progress import Progress
from llm_fed.method import Upload
from llm_fed.runs.folder import Run, log_event
from llm_fed.state import State

FREE_ROUNDS = 2  # rounds in which norms are not compared: those of fresh adapters' updates may differ by more


def flaws(contents: list[Any], expected: list[Any], bound: float | None) -> list[str]:
    """Per upload what is wrong with it, in words; empty where nothing is.

    Args:
        contents: the uploads' messages.
        expected: the skeleton that each should have.
        bound: the largest norm, as a multiple of the median over those uploads given here that are otherwise without
            flaw; None: norms are not compared. The median is that of one round's arrivals, late ones among them: an
            upload that arrives alone is its own median and is never refused for its norm, and of two one is refused
            only where `bound` is below 2.
    """
    found = [_flaw(skeleton(content), wanted, "upload") for content, wanted in zip(contents, expected, strict=True)]
    norms = [_norm(content) for content in contents]
    usual = [norm for norm, flaw in zip(norms, found, strict=True) if not flaw and math.isfinite(norm)]
    median = statistics.median(usual) if usual else math.inf
    for k, norm in enumerate(norms):
        if not found[k] and not math.isfinite(norm):
            found[k] = "it holds NaN or infinite values, or its norm overflows"
        elif not found[k] and bound is not None and norm > bound * median:
            found[k] = f"its norm {norm:.3g} is over {bound:g} times the median {median:.3g} of this round (norm_bound)"
    return found


def skeleton(message: Any) -> Any:
    """Names, shapes and dtypes of a message without its values, as plain lists and dicts."""
    if isinstance(message, State):
        entries = {name: list(shape) for name, shape in message.layout.shape_of.items()}
        found: dict[str, Any] = {"dtype": str(message.row.dtype), "entries": entries}
        return found | ({"extras": skeleton(message.extras)} if message.extras else {})
    if isinstance(message, torch.Tensor):
        return {"dtype": str(message.dtype), "shape": list(message.shape)}
    if isinstance(message, dict):
        return {key: skeleton(value) for key, value in message.items()}
    if isinstance(message, list | tuple):
        return [skeleton(item) for item in message]
    return type(message).__name__


def _flaw(got: Any, wanted: Any, where: str) -> str:
    """The first place where two skeletons differ; empty where they agree."""
    if got == wanted:
        return ""
    if isinstance(got, dict) and isinstance(wanted, dict):
        for key in [*wanted, *got]:
            if key not in got or key not in wanted:
                return f"{where} has {'no' if key in wanted else 'an unexpected'} {key}"
            if flaw := _flaw(got[key], wanted[key], f"{where}.{key}"):
                return flaw
        return f"{where} has its entries in another order"
    return f"{where} is {got}, expected {wanted}"


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
    contents = [item.content.message() for item in due]
    # Whether an upload is refused must not depend on the others where their sum is to hide each of them.
    compared = progress.round > FREE_ROUNDS and not central(run.config.privacy)
    bound = run.config.norm_bound if compared else None
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
