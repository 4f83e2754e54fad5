"""The report of a run."""

from __future__ import annotations

from pathlib import Path


def write_report(run_dir: str | Path) -> Path:
    """See `run.write_report`. Matplotlib is imported only here, as a run trains long before it draws a picture."""
    from llm_fed.eval.report import run

    return run.write_report(run_dir)


def write_anew(run_dir: Path, *beside: str) -> Path:
    """Write the report of a run anew, as far as it has come, and of a finished one its digest and those of the files
    `beside` it that are new, too; the same as above."""
    from llm_fed.runs.reading import is_finished, saved_config

    saved_config(run_dir)  # what follows takes seconds to import, so mistakes are named first
    from llm_fed.runs.digests import of_file
    from llm_fed.runs.folder import take_down

    path = write_report(run_dir)
    if is_finished(run_dir):
        take_down(run_dir, {name: of_file(run_dir / name) for name in (path.name, *beside)})
    return path
