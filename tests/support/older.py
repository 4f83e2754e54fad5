"""Run folders as older versions left them."""

from __future__ import annotations

from pathlib import Path

from llm_fed.runs import digests
from llm_fed.runs.checkpoint import Checkpoints


def without_digests(folder: Path) -> None:
    """Of a version that took no digests down."""
    (folder / digests.FILE).unlink()
    held = Checkpoints(folder / "checkpoints")
    for round in held.rounds():
        saved = held.load(round)
        held.save(round, {key: value for key, value in saved.state.items() if key != "digests"}, saved.rows)
