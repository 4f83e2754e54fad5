"""The page of error messages: what the program says, collected from the code, and what it means.

messages.yaml names a message by a piece of it. The page shows the whole message as the code has it, with … where a
value stands; a piece that no message has, or several have, is an error. So page and code stay together.
"""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ERRORS = ("UserError", "RunError")
VALUE = "…"
HEAD = """# Troubleshooting by error message

Search this page for a few words of the message; … stands for a value. Each message says what to do; here is why, for
those that leave a question. Exit code 2 means a mistake in what was given, and 1 something that went wrong on the way.
`python scripts/lists.py` writes the page from [scripts/messages.yaml](../scripts/messages.yaml).

**Python says that `module 'llm_fed' has no attribute 'run'`.** It was started in the folder above a clone named
llm_fed. Start it anywhere else.
"""


def page() -> str:
    """The whole page.

    Raises:
        LookupError: no message has a piece, or several have it.
    """
    messages = collected()
    parts = [HEAD]
    for section, explained in yaml.safe_load((ROOT / "scripts/messages.yaml").read_text()).items():
        items = [
            f"- {_filled(_code(_only(piece, messages)))}<br>\n  {_filled(explained[piece])}" for piece in explained
        ]
        parts.append(f"\n## {section}\n\n" + "\n".join(items) + "\n")
    return "".join(parts)


@cache
def collected() -> list[str]:
    """The messages of all errors that the code raises, … in the place of values."""
    files = [path for folder in ("llm_fed", "tasks", "eval") for path in sorted((ROOT / folder).rglob("*.py"))]
    calls = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return sorted({_text(call.args[0]) for call in calls if getattr(call.func, "id", None) in ERRORS and call.args})


def _text(node: ast.expr) -> str:
    """Of an expression, its literal text."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return VALUE


def _only(piece: str, messages: list[str]) -> str:
    having = [message for message in messages if piece in message]
    if len(having) != 1:
        raise LookupError(f"{len(having)} messages have {piece!r}; correct scripts/messages.yaml: {having}")
    return having[0]


def _code(message: str) -> str:
    """The beginning of a message as code, without its own signs of code."""
    plain = re.sub(f"{VALUE}+", VALUE, message.replace("`", ""))
    return f"`{textwrap.shorten(plain, 100, placeholder=f' {VALUE}')}`"


def _filled(text: str) -> str:
    """As lines of an item of a list, with room for what stands before and behind them."""
    return textwrap.fill(text, 106, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
