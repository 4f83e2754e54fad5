"""`llm-fed methods`: the methods of llm_fed from a file, since their classes import torch, and those of installed
packages from their classes.

    python -m llm_fed.commands.methods    # writes the file anew, after a class has changed
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llm_fed.settings import plugins

LIST = Path(__file__).parents[1] / "assets" / "methods.json"


def rows() -> list[dict[str, Any]]:
    """Every method with its paper, and the defaults and ranges of its settings, or what is wrong with it."""
    own: list[dict[str, Any]] = json.loads(LIST.read_text(encoding="utf-8"))
    if not plugins.by_name(plugins.METHODS):
        return own
    from llm_fed.methods import outside

    return own + outside()


def text() -> str:
    """What the file has to hold."""
    from llm_fed.methods import builtin

    return json.dumps(builtin(), indent=1) + "\n"


if __name__ == "__main__":
    LIST.write_text(text())
