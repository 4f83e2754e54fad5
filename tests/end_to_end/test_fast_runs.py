"""Runs with engine.fast=on, on a CPU: the training that they were, what they record, and how they go on."""

import json

import every
import pytest
from equal_runs import adapters

from llm_fed.engine import capture
from llm_fed.runs.records import read_records

CHANGES = {
    "rounds": 3,
    "local": {"steps": 4, "lr": 0.01, "lr_end": 0.01},
    "eval": {"every": 0},
    "report": {"samples": 0},
}


def passes(folder) -> list[dict[str, int]]:
    return [line["passes"] for line in read_records(folder / "timing.jsonl") if "passes" in line]


def apart(one, other) -> float:
    pairs = [(tensors[name], other[client][name]) for client, tensors in one.items() for name in tensors]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("method", every.quick(["fedit", "local", "fedmerge", "fedem"], ["fedem"]))
def test_a_fast_run_is_the_run_and_says_what_it_did(method, small, tmp_path, llm_fed):
    """Nearly every micro-batch is replayed once its shape has come often enough, in later rounds too; none is padded
    but to the shapes of the grid."""
    config = small.config(tmp_path / "c.yaml", **CHANGES)
    plain, fast = tmp_path / "plain", tmp_path / "fast"
    said = llm_fed("run", config, f"method={method}", "--out", plain)
    assert said.code == 0 and "passes" not in said.err
    said = llm_fed("run", config, f"method={method}", "engine.fast=on", "--out", fast)
    assert said.code == 0 and "passes     as on a GPU (engine.fast=on), which gains nothing on cpu" in said.err
    assert not passes(plain) and len(counts := passes(fast)) == 3
    assert counts[0]["as written"] >= capture.USES and counts[2]["as written"] == 0 < counts[2]["replayed"]
    assert all(count["padded"] == 0 < count["without padding"] for count in counts)
    assert 0 < apart(adapters(plain), adapters(fast)) < 5e-6
    known = [json.loads((folder / "environment.json").read_text()) for folder in (plain, fast)]
    assert [(each["captured"], each["padding_free"]) for each in known] == [(False, False), (True, True)]
    audit = llm_fed("audit", fast)
    assert audit.code == 0 and "another environment" not in audit.out + audit.err


def test_a_run_that_began_as_written_may_go_on_otherwise(small, tmp_path, llm_fed):
    """It says that the last bits may differ, and its audit knows."""
    config, run = small.config(tmp_path / "c.yaml", **CHANGES), tmp_path / "run"
    assert llm_fed("run", config, "rounds=1", "--out", run).code == 0
    again = llm_fed("run", config, "rounds=2", "--out", run)
    assert again.code == 0 and "another environment" not in again.err
    said = llm_fed("run", config, "engine.fast=on", "--out", run)
    assert said.code == 0 and "captured False -> True; padding_free False -> True" in said.err
    assert "last bits" in said.err and len(passes(run)) == 1
    assert set(passes(run)[0]) == {"replayed", "as written", "without padding", "padded"}
    audit = llm_fed("audit", run)
    assert "was continued in another environment" in audit.out + audit.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["privacy.unit=example", "privacy.clip=1.0", "privacy.noise=0.5"],
            "privacy.unit=example needs the gradients of single examples",
        ),
        (["method=flora"], "frozen weights lie beneath the adapters"),
    ],
)
def test_what_cannot_be_fast_says_so_and_trains(words, why, small, tmp_path, llm_fed, caplog):
    config = small.config(tmp_path / "c.yaml", **CHANGES)
    said = llm_fed("run", config, *words, "rounds=2", "engine.fast=on", "--out", tmp_path / "run")
    assert said.code == 0 and passes(tmp_path / "run")[1]["replayed"] == 0
    assert [line["why"] for line in read_records(tmp_path / "run/timing.jsonl") if "round" in line][-1] == why
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count(f"training passes are not captured: {why}") == 1
