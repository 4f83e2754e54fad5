"""Writes docs/methods.md, docs/tasks.md and docs/configuration.md from the classes and tables themselves.

python scripts/lists.py
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import settings_page

from llm_fed import methods, tasks

DOCS = Path(__file__).parents[1] / "docs"
METHODS = """# Methods

Name one as `method=NAME`, and a setting as `method.SETTING=VALUE`. A method of your own needs no fork: see
[CONTRIBUTING.md](../CONTRIBUTING.md). This page is written by `python scripts/lists.py` from the classes in
[llm_fed/methods](../llm_fed/methods), one file for each paper, whose docstrings say more.

"Adapters" are LoRA adapters, of a language model or of an image model such as ViT. "Whole models" are image models
that are trained whole (`adapter: null`).

"""
SETTINGS = """
## Settings

What a method has beside the settings of every run, with its default, and what else it may be. The comment at each
field in the class says what it means.

"""
TASKS = """# Tasks

Name one as `task.name=NAME`, and local files as `task.path`. `task.partition` divides examples into clients where the
data do not. This page is written by `python scripts/lists.py` from the table in [tasks](../tasks/__init__.py).

"""


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text)
        print(DOCS / name)


def pages() -> dict[str, str]:
    return {"methods.md": methods_page(), "tasks.md": tasks_page(), "configuration.md": settings_page.page()}


def methods_page() -> str:
    rows, settings = [], []
    for described in methods.builtin():
        kind, method = methods.METHODS[described["name"]], methods.build({"name": described["name"]})
        names = [described["name"], *described["aliases"]]
        needs = f"; starts from {' and '.join(f'`{need}`' for need in kind.needs)}" if kind.needs else ""
        trains = "adapters" if method.adapters_only else "whole models" if method.whole_models else "both"
        rows.append([", ".join(f"`{name}`" for name in names), first_sentence(kind), trains + needs, kind.paper])
        own = [setting(key, default, described["ranges"].get(key)) for key, default in described["settings"].items()]
        if own:
            settings.append([f"`{described['name']}`", "<br>".join(own)])
    first = table(["name", "what it does", "trains", "paper"], rows)
    return METHODS + first + SETTINGS + table(["method", "settings"], settings)


def setting(key: str, default: object, must_be: str | None) -> str:
    text = json.dumps(default).strip('"')  # null, true, false as YAML has them
    return f"`{key}: {text}`" + (f" ({must_be})" if must_be else "")


def tasks_page() -> str:
    rows = [
        [f"`{row['name']}`", row["clients"], row["metric"], row["source"]]
        for row in tasks.describe()
        if row["name"] in tasks.TASKS
    ]
    return TASKS + table(["name", "clients", "metric", "source"], rows)


def first_sentence(kind: type) -> str:
    """Of a class's docstring, without Markdown's own signs."""
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)0-9])\. (?=[A-Z])", text)[0].rstrip(".").replace("|", "\\|").replace("*", "\\*") + "."


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
