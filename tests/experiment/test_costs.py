"""What a dry run says of a run's memory, in words."""

from __future__ import annotations

from typing import Any

import pytest

from llm_fed.experiment.costs import Costs, CountSummary

GB = 10**9


def costs(**changes: Any) -> Costs:
    given: dict[str, Any] = {
        "down": CountSummary(), "up": CountSummary(), "exact": True,
        "down_first": 0, "up_first": 0, "down_run": 0, "up_run": 0,
        "base": 6 * GB, "training": 2 * GB, "client": GB // 4, "activations": 4 * GB, "smallest": GB, "token": 250_000,
        "cache": 114_688, "memory_free": 10 * GB, "smaller": ("base.quantization=nf4",), "state": 0, "kept": 0,
        "disk_free": 0,
    }  # fmt: skip
    return Costs(**{**given, **changes})


def test_memory_by_its_parts():
    assert costs().rows()["memory"] == (
        "about 12.0 GB to train: base 6.0 GB, trained parameters with gradients and optimizer state 2.0 GB (250.0 MB "
        "per client), activations about 4.0 GB (250.0 kB per token of a micro-batch); scoring is not included "
        "except for 114.7 kB per generated token"
    )


def test_whole_models_have_no_tokens():
    said = costs(token=None, cache=None).rows()["memory"]
    assert "activations about 4.0 GB; scoring is not included" in said and "generated" not in said


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (10.0, "yes, about 4.0 GB would be left"),
        (6.0, "yes, about 0 bytes would be left"),
        (5.5, "only with smaller micro-batches, which a run tries by itself: 500.0 MB too little"),
        (2.5, "no, 500.0 MB too little even with one example at a time"),
    ],
)
def test_whether_it_fits_beside_the_base(free, said):
    """2 GB of adapters and 4 GB of activations, or 1 GB with single examples."""
    missing = "" if said.startswith("yes") else "; these settings need less: base.quantization=nf4"
    assert costs(memory_free=int(free * GB)).rows()["fits"] == said + missing


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (13.0, "yes, about 2.0 GB would be left"),
        (8.0, "yes, but 3.0 GB too little for all captured passes, so some run as they are written, or in smaller"),
        (5.5, "only with smaller micro-batches, which a run tries by itself: 500.0 MB too little"),
    ],
)
def test_captured_passes_need_more_where_there_is_room(free, said):
    price = costs(memory_free=int(free * GB), graphs=5 * GB)
    assert price.rows()["fits"].startswith(said)
    assert price.rows()["memory"].startswith("about 17.0 GB to train")
    assert "captured passes about 5.0 GB more, reasoned and not measured; scoring" in price.rows()["memory"]


def test_where_no_client_trains_here_nothing_is_said_of_it():
    assert "fits" not in costs(training=0, client=0, activations=0).rows()
