"""Settings that would change nothing in a run: a reader of its configuration would believe the wrong thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from llm_fed import kinds, tasks
from llm_fed.basics.errors import UserError, inert
from llm_fed.settings.config import ColumnsConfig, Config

BY_LABEL = ("dirichlet", "pathological", "cluster")
OWN_FILES = ("files", "classification", "regression")  # tasks of a user's own files
WITH_COLUMNS = (*OWN_FILES, "flan", "flan-2000", "commonsense")  # tasks whose columns can be named


@dataclass(frozen=True)
class Rule:
    """A setting that counts only beside others."""

    key: str
    counts: Callable[[Config], bool]
    beside: str  # what these others are


def _partition(kinds: tuple[str, ...]) -> Callable[[Config], bool]:
    return lambda config: config.task.partition.kind in kinds


def _read(name: str) -> Callable[[Config], bool]:
    return lambda config: name in kinds.chosen(config).uses


def _columns(config: Config) -> bool:
    return config.task.name not in tasks.TASKS or config.task.name in WITH_COLUMNS


_DEFAULT = Config()
RULES = (
    Rule("task.partition.alpha", _partition(BY_LABEL[:2]), "task.partition.kind=dirichlet or pathological"),
    Rule("task.partition.clients", lambda config: config.task.partition.kind != "natural",
         "a task.partition.kind that makes new clients, e.g. iid or dirichlet"),
    Rule("task.partition.label",
         lambda config: config.task.partition.kind in BY_LABEL or config.task.partition.test is not None,
         f"task.partition.kind={', '.join(BY_LABEL)}, or with task.partition.test"),
    *(Rule(f"task.{name}", _read(name), "a task of text")
      for name in ("template", "loss_on", "max_length", "too_long", "bad_rows")),
    *(Rule(f"task.columns.{field.name}", _columns, f"the tasks {', '.join(WITH_COLUMNS)}")
      for field in dataclasses.fields(ColumnsConfig) if field.name != "client"),
    Rule("task.columns.client", lambda config: config.task.name not in tasks.TASKS or config.task.name in OWN_FILES,
         f"the tasks {', '.join(OWN_FILES)}"),
    Rule("eval.max_new_tokens", _read("template"), "a task of text"),
    Rule("eval.of_last", lambda config: config.eval.select == "best", "eval.select=best"),
    Rule("stop.min_delta", lambda config: config.stop.patience is not None, "stop.patience"),
    Rule("privacy.delta", lambda config: config.privacy.clip is not None, "privacy.clip"),
    Rule("privacy.where", lambda config: config.privacy.clip is not None and config.privacy.unit == "client",
         "privacy.clip and privacy.unit=client"),
    Rule("privacy.bound", lambda config: config.privacy.secure and not config.privacy.central, "privacy.secure=true"),
    Rule("server.liars", lambda config: config.server.aggregation != "mean", "a server.aggregation other than mean"),
)  # fmt: skip


def check(config: Config) -> None:
    """Refuse a setting of a new run that would change nothing, or would never be reached. UserError: the first one, and
    what to do about it."""
    for rule in RULES:
        value = attrgetter(rule.key)
        if value(config) != value(_DEFAULT) and not rule.counts(config):
            raise inert(rule.key, value(config), rule.beside)
    local = config.local
    if local.steps is not None and local.warmup_steps >= local.steps:
        raise UserError(
            f"local.warmup_steps={local.warmup_steps} leaves none of the {local.steps} steps of a round at local.lr; "
            "lower it, or raise local.steps"
        )
