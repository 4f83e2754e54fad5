"""What a dry run says of a run's memory, in words."""

from typing import Any

import pytest

from llm_fed.basics.errors import UserError
from llm_fed.experiment.costs import Costs, CountSummary

GB = 10**9


def costs(**changes: Any) -> Costs:
    given: dict[str, Any] = {
        "down": CountSummary(), "up": CountSummary(), "down_run": 0, "up_run": 0,
        "base": 6 * GB, "step": 2 * GB, "memory_free": 10 * GB, "smaller": ("base.quantization=nf4",), "state": 0,
        "disk_free": 0,
    }  # fmt: skip
    return Costs(**{**given, **changes})


def test_memory_by_its_parts():
    rows = costs().rows()
    assert rows["memory"] == (
        "about 8.0 GB to train: base 6.0 GB, and a training step 2.0 GB (measured); scoring is not included"
    )
    assert rows["fits"] == "yes, about 8.0 GB would be left" and rows["free"].startswith("10.0 GB of memory")


def test_what_does_not_fit_beside_the_base_is_refused():
    costs(memory_free=2 * GB).check()
    with pytest.raises(UserError, match="a training step takes about 2.0 GB of memory beside the base, and 1.0 GB are "
                                        "free; these settings need less: base.quantization=nf4"):  # fmt: skip
        costs(memory_free=GB).check()


def test_where_no_client_trains_here_nothing_is_said_of_it():
    rows = costs(step=None).rows()
    assert "fits" not in rows and rows["memory"] == "6.0 GB for the base"
