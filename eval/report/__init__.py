"""The report of a run."""

from __future__ import annotations

from pathlib import Path


def write_report(run_dir: str | Path, *, goes_on: bool = False) -> Path:
    """See `run.write_report`. Matplotlib is imported only here, as a run trains long before it draws a picture."""
    from llm_fed.eval.report import run

    return run.write_report(run_dir, goes_on=goes_on)
