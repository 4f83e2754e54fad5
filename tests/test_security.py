"""SECURITY.md promises nothing without a test."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ATTACKERS = {"client", "server", "user", "folder", "base", "data", "configuration"}


def promises() -> list[list[str]]:
    """The cells of each row of the table."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = text.partition("| promise | attacker | test |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_promise_names_its_attackers_and_a_test():
    rows = promises()
    assert len(rows) > 15
    for promise, attackers, tests, _ in rows:
        assert {*attackers.split(", ")} <= ATTACKERS, promise
        assert TEST.findall(tests), f"no test: {promise}"


def test_every_test_that_the_page_names_exists():
    for path, name in TEST.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8")):
        assert name.startswith("test_") and name in functions_of(path), f"{path} has no {name}"
