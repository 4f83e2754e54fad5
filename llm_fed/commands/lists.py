"""What `llm-fed methods` and `llm-fed tasks` list, those of installed packages at the end."""

from __future__ import annotations

from typing import Any

from llm_fed import methods, tasks


def of_methods() -> list[dict[str, Any]]:
    return methods.builtin() + methods.outside()


def of_tasks() -> list[dict[str, Any]]:
    return tasks.describe()
