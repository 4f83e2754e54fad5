"""Run folders as older versions left them."""

from __future__ import annotations

from pathlib import Path

from llm_fed.runs import digests
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.folder import SPLITS


def without_digests(folder: Path) -> None:
    """Of a version that took no digests down."""
    (folder / digests.FILE).unlink()
    (folder / digests.DELIVERED).unlink(missing_ok=True)
    held = Checkpoints(folder / "checkpoints")
    for round in held.rounds():
        saved = held.load(round)
        held.save(round, {key: value for key, value in saved.state.items() if key != "digests"}, saved.rows)


def without_rows(folder: Path) -> None:
    """Of a version that knew no `task.held_out`, and did not remember the rows of a run."""
    (folder / SPLITS).unlink()
    config = folder / "config.yaml"
    lines = config.read_text().splitlines(True)
    config.write_text("".join(line for line in lines if "held_out" not in line and not line.startswith("# sha256")))
