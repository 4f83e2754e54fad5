"""The blocks of code of the pages, and which of them the tests do not run, with the reason (docs/not_run.yaml)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
NOT_RUN = ROOT / "docs" / "not_run.yaml"
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, at a line."""

    page: str
    line: int
    language: str
    code: str


def blocks(page: str, text: str) -> list[Block]:
    """All of them, those without a language too."""
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["code"])
        for match in _BLOCK.finditer(text)
    ]


@cache
def not_run() -> dict[str, dict[str, str]]:
    """By page and by how a block begins, why the tests do not run it."""
    return yaml.safe_load(NOT_RUN.read_text())


def reason(block: Block) -> str | None:
    """Why a block is not run, if it is in the list."""
    listed = not_run().get(block.page, {})
    return next((why for start, why in listed.items() if block.code.lstrip().startswith(start)), None)
