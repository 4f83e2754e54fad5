"""Writes the pages of methods, tasks, settings and error messages from the code itself.

python scripts/lists.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import messages
import settings_page
import yaml

from llm_fed import methods, tasks

DOCS = Path(__file__).parents[1] / "docs"
METHODS = """# Methods

Choose one with `method=NAME`, and change a setting with `method.SETTING=VALUE`; `llm-fed methods` prints all settings.
[Which method?](choosing.md) helps to choose, and [CONTRIBUTING.md](../CONTRIBUTING.md) says how to add your own. In the
site each name leads to a page with the idea, the formulas, the settings and the code, which also says whether it
trains LoRA adapters, whole image models (`adapter: null`) or both.

Where nothing stands under "measured here", a method ran on the tiny base of 6 million parameters alone ([a
record](results/log/flan.md)), or not on real data.

`python scripts/lists.py` writes this page from [scripts/methods.yaml](../scripts/methods.yaml) and the classes.
"""
TASKS = """# Tasks

Choose a built-in data set with `task.name=NAME`. `task.path` reads it from a folder (images also from an npz file)
instead of the Hub, and where it has one client, `task.partition` divides it. `python scripts/lists.py` writes the page
from [tasks](../tasks/__init__.py).

"""


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text)
        print(DOCS / name)


def pages() -> dict[str, str]:
    return {
        "methods.md": methods_page(), "tasks.md": tasks_page(), "configuration.md": settings_page.page(),
        "troubleshooting.md": messages.page(),
    }  # fmt: skip


def methods_page() -> str:
    """A table per section of methods.yaml.

    Raises:
        LookupError: a method has no row there, or a row no method.
    """
    sections = yaml.safe_load((Path(__file__).parent / "methods.yaml").read_text())
    described = {each["name"]: each for each in methods.builtin()}
    if unlike := set(described) ^ {name for section in sections.values() for name in section}:
        raise LookupError(
            f"scripts/methods.yaml and the methods of llm_fed differ in {sorted(unlike)}; add or delete rows"
        )
    parts = [METHODS]
    for title, section in sections.items():
        rows = [method_row(described[name], **about) for name, about in section.items()]
        parts.append(f"\n## {title}\n\n" + table(["method", "use it", "measured here", "paper"], rows))
    return "".join(parts)


def method_row(described: dict[str, Any], use: str, measured: str = "") -> list[str]:
    names = ", ".join(f"`{name}`" for name in [described["name"], *described["aliases"]])
    return [names, use, measured, methods.BUILTIN[described["name"]].paper]


def tasks_page() -> str:
    rows = [
        [f"`{row['name']}`", row["clients"], row["metric"], row["source"]]
        for row in tasks.describe()
        if row["name"] in tasks.TASKS
    ]
    return TASKS + table(["name", "clients", "metric", "source"], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
