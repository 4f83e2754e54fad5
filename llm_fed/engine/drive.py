"""Coroutine clients: runs many `async` methods side by side, and hands work of the same kind to one fused execution.

A client's coroutine runs until it awaits a `Request`; when every client of the pass waits, requests of one type and
structure are executed together and each client goes on with its own result. No event loop is involved, and the order is
fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import TypeVar

from llm_fed.method.requests import Request, Result

Answer = TypeVar("Answer")


def drive(
    work: Mapping[str, Coroutine[Request[Answer], Answer | None, Result]],
    execute: Callable[[Sequence[Request[Answer]]], Sequence[Answer]],
) -> dict[str, Result | Exception]:
    """Run the coroutines to their ends.

    Args:
        work: coroutine by site, in the order that decides how requests are packed.
        execute: answers requests of one type and structure, in order; an exception instance as an answer is raised in
            that coroutine.

    Returns:
        Per site the coroutine's return value, or the exception that ended it: one client's failure ends that client
        alone.
    """
    outcomes: dict[str, Result | Exception] = {}
    waiting: dict[str, Request[Answer]] = {}
    answers: dict[str, Answer | None] = dict.fromkeys(work)
    while answers:
        for site, answer in answers.items():
            waiting.pop(site, None)
            try:
                step = work[site].throw(answer) if isinstance(answer, Exception) else work[site].send(answer)
                waiting[site] = step
            except StopIteration as stop:
                outcomes[site] = stop.value
            except Exception as error:
                outcomes[site] = error
        groups: dict[Hashable, list[str]] = {}
        for site in work:
            if site in waiting:
                groups.setdefault((type(waiting[site]), waiting[site].structure), []).append(site)
        answers = {}
        for sites in groups.values():
            answers.update(zip(sites, execute([waiting[site] for site in sites]), strict=True))
    return {site: outcomes[site] for site in work}
