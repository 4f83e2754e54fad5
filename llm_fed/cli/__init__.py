"""The command line `llm-fed`: thin commands over the library, errors in one or two lines, results on standard
output."""

import sys

if sys.platform == "win32":  # locks and limits are those of POSIX
    sys.exit("llm-fed runs on Linux and macOS; on Windows, install it in WSL (wsl --install)")

# Their commands are registered on import, and `llm-fed --help` lists them in this order.
from llm_fed.cli import information, training, merging, evaluation, sharing  # noqa: E402, F401, I001
from llm_fed.cli.program import app, main  # noqa: E402

__all__ = ["app", "main"]
