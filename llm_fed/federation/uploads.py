"""What the server receives: what arrives in a round, the checks that each upload passes before a method sees it, and
how the clients' updates compare, so that one finds the client that spoils a round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from types import MappingProxyType

import torch
from torch import Tensor

from llm_fed.basics.documents import Json
from llm_fed.federation.bounds import NOT_FINITE, far
from llm_fed.federation.progress import InFlight, Progress
from llm_fed.method import Method, Upload
from llm_fed.runs.folder import Run, log_event
from llm_fed.state import State, rebased
from llm_fed.state.outline import difference, infinite, mapped, skeleton
from llm_fed.state.roles import Given, Roles, Weights, leaves, own_flaw, role_of
from llm_fed.state.wire import Message, WireError


def flaws(
    contents: Sequence[Message | WireError],
    given: Sequence[Given],
    bound: float | None,
    roles: Roles = MappingProxyType({}),
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
    reasons: list[str] = []
    for content, its in zip(contents, given, strict=True):
        if isinstance(content, WireError):
            reasons.append(str(content))
        else:
            flaw = difference(skeleton(content), its.skeleton, "upload") or infinite_flaw(content)
            reasons.append(flaw or own_flaw(content, roles, its))
    whole = {index: content for index, content in enumerate(contents) if not reasons[index]}
    far_off = far(whole, roles, given, bound)
    return [far_off.get(index, reason) for index, reason in enumerate(reasons)]


def _decoded(item: InFlight) -> Message | WireError:
    try:
        return item.content.message(item.given.skeleton)
    except WireError as error:
        return error


def infinite_flaw(content: Message) -> str:
    """What holds a number that is not finite; empty where nothing does."""
    where = infinite(content, "upload")
    return "" if not where else ("" if where == "upload" else f"{where}: ") + NOT_FINITE


def _from_now(content: Message, item: InFlight, method: Method, progress: Progress) -> Message:
    """A late answer whose running statistics are the change from those that its client would be sent now."""
    if item.requested == progress.round:
        return content
    known = {path: item.given.at(path) for path, value in leaves(content) if _is_change(method.sends, path, value)}
    if not any(known.values()):
        return content
    now = Given.of(method.upload_like(method.broadcast(progress.state, item.client)), None)
    parts = iter(
        [rebased(value, known[path], now.at(path)) if known.get(path) else value for path, value in leaves(content)]
    )
    return mapped(content, lambda value: next(parts))


def _is_change(roles: Roles, path: str, value: Message) -> bool:
    role = role_of(roles, path, value)
    return isinstance(role, Weights) and role.changes and role.known and bool(value.extras)


def arrivals(run: Run, method: Method, progress: Progress, record: dict[str, Json]) -> list[Upload]:
    """Take what is due off its way, in the order (arrival, client), and refuse what is not as it should be; `record`
    takes how many."""
    due = [item for item in progress.in_flight if item.arrival <= progress.round]
    due.sort(key=lambda item: (item.arrival, item.client))
    progress.in_flight = [item for item in progress.in_flight if item.arrival > progress.round]
    contents = [_decoded(item) for item in due]
    # Whether an upload is refused must not depend on the others where their sum is to hide each of them.
    hidden = run.config.privacy.central or run.config.privacy.secure
    bound = None if hidden else run.config.norm_bound
    uploads = []
    reasons = flaws(contents, [item.given for item in due], bound, method.sends)
    for item, content, flaw in zip(due, contents, reasons, strict=True):
        if flaw:
            log_event(run, progress.round, item.client, "refused upload", flaw)
            continue
        content = _from_now(content, item, method, progress)
        uploads.append(Upload(item.client, item.num_examples, progress.round - item.requested, content))
    before = record.get("refused", 0)
    assert isinstance(before, int)
    record |= {"arrived": len(uploads), "refused": before + len(due) - len(uploads)}
    return uploads


def compared(method: Method, state: Message, uploads: Sequence[Upload]) -> dict[str, list[float | None]]:
    """By client the norm of its update, and its cosine with the mean of the other updates of the round; None where no
    other has the same shape, or one of the two is zero. Of uploads without states nothing is known. `state`: of the
    server, before its step."""
    parts = {each.client: [leaf.row for _, leaf in leaves(each.content) if isinstance(leaf, State)] for each in uploads}
    rows = {client: torch.cat(own).double() for client, own in parts.items() if own}
    role = role_of(method.sends, "", uploads[0].content) if uploads else None
    if rows and isinstance(role, Weights) and not role.changes:
        rows = _changes(rows, method, state, uploads)
    sums: dict[int, Tensor] = {}
    for row in rows.values():
        sums[len(row)] = sums[len(row)] + row if len(row) in sums else row.clone()
    return {client: [_short(row.norm()), _cosine(row, sums[len(row)] - row)] for client, row in rows.items()}


def _changes(rows: dict[str, Tensor], method: Method, state: Message, uploads: Sequence[Upload]) -> dict[str, Tensor]:
    """The changes in training, where uploads are models like what was sent: they are nearer to it than to zero."""
    changes = {}
    for upload in uploads:
        sent = method.broadcast(state, upload.client)
        if not (isinstance(sent, State) and isinstance(upload.content, State) and sent.layout == upload.content.layout):
            return rows
        changes[upload.client] = rows[upload.client] - sent.row.double()
    nearer = fmean(float(row.norm()) for row in changes.values()) < fmean(float(row.norm()) for row in rows.values())
    return changes if nearer else rows


def _cosine(row: Tensor, others: Tensor) -> float | None:
    norms = row.norm() * others.norm()
    return _short((row @ others) / norms) if norms > 1e-30 else None


def _short(value: Tensor) -> float:
    """Three significant digits, which is what a picture shows; the last bits depend on the packing."""
    return float(f"{float(value):.3g}")
