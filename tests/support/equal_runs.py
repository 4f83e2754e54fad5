"""Whether two run folders hold the same run."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter


def quiet() -> Reporter:
    return Reporter(Console(quiet=True))


def files(folder: Path, *others: str) -> dict[str, bytes]:
    """What must not depend on how often a run was killed, without `others` (beginnings of names)."""
    skipped = ("checkpoints/", "timing.jsonl", "report.html", "delivered.json", ".lock", *others)
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(skipped)}


def adapters(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.parent.name: load_file(path) for path in sorted(run.glob("adapters/*/*.safetensors"))}


def weights(folder: Path) -> dict[str, bytes]:
    files = sorted(folder.glob("adapters/*/*.safetensors"))
    assert files
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_equal(one: Path, other: Path) -> None:
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert weights(one) == weights(other)


def without_neighbours(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same files but for what a run says of a run of `local` that lies beside it."""
    kept = {name: content for name, content in files.items() if name != "warnings.json"}
    if "summary.json" in kept:
        summary = json.loads(kept["summary.json"])
        for key in ("warnings", "unchecked", "checksum"):
            summary.pop(key, None)
        kept["summary.json"] = json.dumps(summary).encode()
    return kept


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, torch.Tensor]]]:
    """The lines of metrics.jsonl but for padding, which depends on the packing; and all exported tensors."""
    lines = read_records(folder / "metrics.jsonl")
    for line in lines:
        line.pop("padding", None)
    files = sorted((folder / "adapters").rglob("*.safetensors"))
    return lines, {str(path.relative_to(folder)): load_file(path) for path in files}


# Of float32. Adam divides a gradient by its own size, so that where one is nearly zero its rounding shows: a step is
# 1e-2, and differences of 2e-6 were seen on some CPUs.
TOLERANCE = 5e-6


def assert_same(one: Path, other: Path, tolerance: float = TOLERANCE) -> None:
    (lines, exported), (found, tensors) = outcome(one), outcome(other)
    assert lines and exported and [line["kind"] for line in found] == [line["kind"] for line in lines]
    for expected, line in zip(lines, found, strict=True):
        assert line.keys() == expected.keys()
        for key, value in line.items():
            if isinstance(value, float):
                assert math.isclose(value, expected[key], rel_tol=1e-4, abs_tol=2e-5), (expected, line)
            elif isinstance(value, int | str):
                assert value == expected[key], (expected, line)
    assert tensors.keys() == exported.keys()
    for name, entries in exported.items():
        torch.testing.assert_close(tensors[name], entries, rtol=0, atol=tolerance)


class StopsAfter(Reporter):
    """Ends a run, as Ctrl-C does, once the lines of a round are written."""

    def __init__(self, round: int):
        super().__init__(Console(quiet=True))
        self._last = round

    def record(self, record):
        super().record(record)
        if record["kind"] == "round" and record["round"] == self._last:
            raise KeyboardInterrupt
