"""Fixtures that several test files share."""

from __future__ import annotations

import pytest
import small_run


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> small_run.Small:
    """A tiny base and a small federation as files, written once."""
    return small_run.make(tmp_path_factory.mktemp("small"))
