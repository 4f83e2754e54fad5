"""What `llm-fed methods` and `llm-fed tasks` list, those of installed packages at the end."""

from __future__ import annotations

from llm_fed import methods, tasks
from llm_fed.basics.documents import Json


def of_methods() -> list[dict[str, Json]]:
    return methods.builtin() + methods.outside()


def of_tasks() -> list[dict[str, Json]]:
    return tasks.describe()
