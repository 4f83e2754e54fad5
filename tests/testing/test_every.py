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


def test_a_few_cases_are_tried_in_every_run():
    first, *others = every.quick([(1, 2), (3, 4), 5], [(1, 2)])
    assert first == (1, 2) and [other.values for other in others] == [(3, 4), (5,)]
    assert all(mark.name == "slow" for other in others for mark in other.marks)
    with pytest.raises(AssertionError):
        every.quick([1], [2])
