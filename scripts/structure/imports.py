"""Measures the import structure of llm_fed: rooms, levels, arrows, upward arrows, cycles between rooms.

    python scripts/structure/imports.py [ROOT] [--arrows] [--rooms] [--modules] [--deferred]

Only imports count that run when a module is imported: at module level, not under TYPE_CHECKING and not inside
functions (--deferred adds those inside functions and under TYPE_CHECKING). ROOT is a checkout (default: here).

A module is one file. A room is what a reader opens as one thing: each file at the root of llm_fed, each direct
subpackage of llm_fed, tasks, eval (packages whole). A package's own __init__ that imports nothing is in its package.
Level of a module (room): 0 with no import of the project's, else 1 + the highest level of what it imports; cycles
count as one node. So an arrow is upward only within a cycle, and a cycle lists each of its arrows.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from pathlib import Path


def sources(root: Path) -> dict[str, Path]:
    paths = {}
    for folder, package in (("llm_fed", "llm_fed"), ("tasks", "llm_fed.tasks"), ("eval", "llm_fed.eval")):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            if "metrics" in parts and folder == "eval":
                continue  # loaded by evaluate as scripts
            paths[".".join([package, *parts])] = path
    return paths


def is_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path, deferred: bool) -> list[tuple[str, str | None, int]]:
    """(module, name or None, line)."""
    imported: list[tuple[str, str | None, int]] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                imported.extend((alias.name, None, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, path
                imported.extend((child.module or "", alias.name, child.lineno) for alias in child.names)
            elif not deferred and (is_checking(child) or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))):
                continue
            else:
                visit(child)

    visit(ast.parse(path.read_text()))
    return imported


def edges(root: Path, deferred: bool) -> dict[str, set[str]]:
    modules = sources(root)
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for module, attribute, _ in imports(path, deferred):
            if module.split(".")[0] != "llm_fed" or module.startswith("llm_fed.eval.metrics"):
                continue
            if attribute and f"{module}.{attribute}" in modules:
                target = f"{module}.{attribute}"
            elif module in modules:
                target = module
            else:
                raise SystemExit(f"{path}: unknown module {module}")
            if target != name:
                graph[name].add(target)
    return graph


def room_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[1:2]) or "llm_fed"


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan; strongly connected components, sinks first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    parts: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            part = []
            while True:
                part.append(stack.pop())
                if part[-1] == node:
                    break
            parts.append(sorted(part))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return parts


def levels(graph: dict[str, set[str]]) -> tuple[dict[str, int], list[list[str]]]:
    parts = components(graph)
    level: dict[str, int] = {}
    for part in parts:
        outside = [level[t] for node in part for t in graph[node] if t not in part]
        for node in part:
            level[node] = 1 + max(outside, default=-1)
    return level, [part for part in parts if len(part) > 1]


def show(what: str, graph: dict[str, set[str]], listing: bool) -> None:
    level, cycles = levels(graph)
    arrows = sum(map(len, graph.values()))
    print(f"{what}: {len(graph)}; levels {1 + max(level.values())}; arrows {arrows}; cycles {len(cycles)}")
    for cycle in cycles:
        print(f"   cycle of {len(cycle)}: {', '.join(cycle)}")
        for node in cycle:
            print(f"      {node} -> {', '.join(sorted(graph[node] & set(cycle)))}")
    if listing:
        for number in range(max(level.values()), -1, -1):
            print(f"   {number:2}: {', '.join(sorted(n for n in level if level[n] == number))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default=".", type=Path)
    for option in ("--rooms", "--modules", "--arrows", "--deferred"):
        parser.add_argument(option, action="store_true")
    options = parser.parse_args()
    graph = edges(options.root, options.deferred)
    show("modules", graph, options.modules)
    between: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    rooms: dict[str, set[str]] = {room_of(name): set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            one, other = room_of(name), room_of(target)
            if one != other:
                rooms[one].add(other)
                between[one][other].append(f"{name} -> {target}")
    show("rooms", rooms, options.rooms)
    _, cycles = levels(rooms)
    for cycle in cycles:
        for one in cycle:
            for other in sorted(rooms[one] & set(cycle)):
                print(f"   {one} -> {other}: {'; '.join(between[one][other][:6])}")
    if options.arrows:
        for one in sorted(rooms):
            for other in sorted(rooms[one]):
                print(f"   {one} -> {other}: {len(between[one][other])}")


if __name__ == "__main__":
    main()
