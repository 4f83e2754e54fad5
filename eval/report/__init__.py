"""Reports in one HTML file each, which needs nothing from outside: of a run, and of a comparison."""

from llm_fed.eval.report.run import write_report

__all__ = ["write_report"]
