"""The command line `llm-fed`: thin commands over the library, errors in one or two lines, results on standard
output."""

# Their commands are registered on import, and `llm-fed --help` lists them in this order.
from llm_fed.cli import information, training, merging, evaluation, sharing  # noqa: F401, I001
from llm_fed.cli.program import app, main

__all__ = ["app", "main"]
