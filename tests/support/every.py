"""Many cases that are alike: one test that tries all of them and names each that fails, or a few in every run."""

import resource
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def quick(cases: Iterable[Case], kept: Collection[Case]) -> list[Any]:
    """The cases for `parametrize`, a tuple for several arguments: all runs of the tests try those in `kept`, and
    `make long` tries the others."""
    cases = [*cases]
    assert all(case in cases for case in kept), kept
    slow = pytest.mark.slow
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow)
        for case in cases
    ]


def passes(cases: Iterable[Case], check: Callable[[Case], object], name: Callable[[Case], str] = str) -> None:
    """Calls `check` on each case; there must be at least one.

    Raises:
        AssertionError: the names of all cases on which it failed, each with what it said.
    """
    cases, failed = [*cases], []
    for case in cases:
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{name(case)}: {type(error).__name__}: {error}")
    assert cases, "there is no case"
    if failed:
        raise AssertionError(f"{len(failed)} of {len(cases)} cases fail:\n" + "\n".join(failed))


@contextmanager
def bounded_memory(gib: int = 2) -> Iterator[None]:
    """Within it this process may take so much more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + gib * 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
