"""A test of many cases says which of them fail, and fails without any."""

import every
import pytest


def small(number: int) -> None:
    assert number < 3
    if number < 0:
        pytest.fail("negative")


def test_each_case_that_fails_is_named():
    with pytest.raises(AssertionError, match=r"3 of 5 cases fail:\nn5: AssertionError: (.*\n)*n-1: Failed: negative"):
        every.passes([1, 5, 2, 7, -1], small, lambda number: f"n{number}")
    every.passes([1, 2], small)


def test_no_case_is_a_failure():
    with pytest.raises(AssertionError, match="there is no case"):
        every.passes([], small)
