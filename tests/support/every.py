"""One test of many cases that are alike: it tries all of them, and its failure names each case that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def passes(cases: Iterable[Case], check: Callable[[Case], None], name: Callable[[Case], str] = str) -> None:
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
