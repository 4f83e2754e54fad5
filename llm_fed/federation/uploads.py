"""What the server receives: what arrives in a round, and the checks that each upload passes before a method sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llm_fed.federation.bounds import NOT_FINITE, far
from llm_fed.federation.privacy import central
from llm_fed.federation.progress import InFlight, Progress
from llm_fed.method import Method, Upload
from llm_fed.runs.folder import Run, log_event
from llm_fed.runs.rows import StoredRow
from llm_fed.state import rebased
from llm_fed.state.outline import Skeleton, difference, infinite, skeleton
from llm_fed.state.roles import Given, Roles, Weights, leaves, own_flaw, role_of
from llm_fed.state.wire import WireError


def flaws(
    contents: Sequence[Any], given: Sequence[Given], bound: float | None, roles: Roles = MappingProxyType({})
) -> list[str]:
    """Per upload what is wrong with it, in words; empty where nothing is.

    Args:
        contents: the uploads' messages, or why there is none.
        given: what is known of each upload before it comes.
        bound: the largest norm of each part, as a multiple of the median over those uploads given here that are
            otherwise without flaw; None: uploads are not compared with each other. The median is that of one round's
            arrivals, late ones among them: an upload that arrives alone is its own median and is never refused for its
            norm, and of two one is refused only where `bound` is below 2. Norms of 0 are left out of it.
        roles: what the method says of the parts (`Method.sends`).
    """
    reasons = [
        str(content) if isinstance(content, WireError) else difference(skeleton(content), its.skeleton, "upload")
        for content, its in zip(contents, given, strict=True)
    ]
    for index, content in enumerate(contents):
        if not reasons[index]:
            reasons[index] = infinite_flaw(content) or own_flaw(content, roles, given[index])
    whole = {index: content for index, content in enumerate(contents) if not reasons[index]}
    for index, flaw in far(whole, roles, given, bound).items():
        reasons[index] = flaw
    return reasons


def _decoded(row: StoredRow, expected: Skeleton) -> Any:
    """The message; a WireError in its place where it is none, or not as expected."""
    try:
        return row.message(expected)
    except WireError as error:
        return error


def infinite_flaw(content: Any) -> str:
    """What holds a number that is not finite; empty where nothing does."""
    where = infinite(content, "upload")
    return "" if not where else ("" if where == "upload" else f"{where}: ") + NOT_FINITE


def _from_now(content: Any, item: InFlight, method: Method, progress: Progress) -> Any:
    """A late answer whose running statistics are the change from those that its client would be sent now."""
    if item.requested == progress.round:
        return content
    late = {path: value for path, value in leaves(content) if _is_change(method.sends, path, value, item.given)}
    if not late:
        return content
    now = Given.of(method.upload_like(method.broadcast(progress.state, item.client)), None)
    return _with(content, {path: rebased(value, item.given.at(path), now.at(path)) for path, value in late.items()})


def _is_change(roles: Roles, path: str, value: Any, given: Given) -> bool:
    role = role_of(roles, path, value)
    return isinstance(role, Weights) and role.changes and role.known and bool(value.extras and given.at(path))


def _with(message: Any, values: Mapping[str, Any], path: str = "") -> Any:
    """The message with other values at these indices."""
    if path in values:
        return values[path]
    if isinstance(message, dict):
        return {key: _with(value, values, f"{path}.{key}" if path else key) for key, value in message.items()}
    if isinstance(message, list):
        return [_with(value, values, f"{path}.{k}" if path else str(k)) for k, value in enumerate(message)]
    return message


def arrivals(run: Run, method: Method, progress: Progress, record: dict[str, Any]) -> list[Upload]:
    """Take what is due off its way, in the order (arrival, client), and refuse what is not as it should be."""
    due = sorted(
        (item for item in progress.in_flight if item.arrival <= progress.round),
        key=lambda item: (item.arrival, item.client),
    )
    progress.in_flight = [item for item in progress.in_flight if item.arrival > progress.round]
    contents = [_decoded(item.content, item.given.skeleton) for item in due]
    # Whether an upload is refused must not depend on the others where their sum is to hide each of them.
    hidden = central(run.config.privacy) or run.config.privacy.secure
    bound = None if hidden else run.config.norm_bound
    reasons = flaws(contents, [item.given for item in due], bound, method.sends)
    for item, flaw in zip(due, reasons, strict=True):
        if flaw:
            log_event(run, progress.round, item.client, "refused upload", flaw)
    uploads = [
        Upload(
            item.client, item.num_examples, progress.round - item.requested, _from_now(content, item, method, progress)
        )
        for item, content, flaw in zip(due, contents, reasons, strict=True)
        if not flaw
    ]
    record |= {"arrived": len(uploads), "refused": record.get("refused", 0) + len(due) - len(uploads)}
    return uploads
