"""The kinds of model and data, one class each (`kind.Kind`): it loads the base, encodes examples, says which loss they
have, answers and exports. A kind of your own is a class in any module, named as `base.kind=package.module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.kinds.kind import Kind as Kind
from llm_fed.settings import objects, plugins
from llm_fed.settings.config import BaseConfig, Config
from llm_fed.tasks import labelled
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.given import NAMES

KINDS = {
    "language": "llm_fed.kinds.language:Language",
    "images": "llm_fed.kinds.images:Images",
    "sequence-classification": "llm_fed.kinds.sequences:Sequences",
}
_MODULES = "llm_fed.kinds.modules:Modules"  # of a user's own, which only an object can be


def of(config: BaseConfig, usual: str) -> type[Kind]:
    """The kind that `base.kind` names, else the `usual` one of the task (`base_kind`). UserError: there is none."""
    name = config.kind or usual
    path = KINDS.get(name, "")
    if objects.is_object(config.name):
        given = objects.find("base.name", config.name)
        if isinstance(given, Kind):
            return type(given)
        path = KINDS["language"] if isinstance(given, tuple) else _MODULES
    found = resolve_name(path) if path else plugins.find("base.kind", name, plugins.KINDS, KINDS)
    if not (isinstance(found, type) and issubclass(found, Kind)):
        raise UserError(f"base.kind={name!r} is {found!r:.60}; it must be a class that derives from llm_fed.kinds.Kind")
    return found


def chosen(config: Config) -> type[Kind]:
    """The kind of a configuration, as far as it is known before the data are read."""
    name = config.task.name
    if objects.is_object(name):
        other = labelled.KIND if name in map(objects.named, labelled.NAMES) else "language"
        return of(config.base, "images" if name == NAMES[True] else other)
    return of(config.base, tasks.find(name).base_kind)


def check_writes(config: Config, why: str) -> None:
    """UserError for a kind whose models write no texts. `why`: the message, with {noun} for what the models are."""
    kind = chosen(config)
    if "texts" not in kind.reads:
        raise UserError(why.replace("{noun}", kind.noun))


def load_alone(config: Config, read: Callable[[], TaskData], device: str) -> Kind:
    """The base of a configuration whose data are only read if the base depends on them."""
    return load(config, TaskData("", "", {}) if chosen(config).before_data else read(), device)


def load(config: Config, task: TaskData, device: str) -> Kind:
    """The base that the sites of a run share. UserError: there is no such base, or a setting is not for its kind."""
    if objects.is_object(config.base.name) and isinstance(given := objects.find("base.name", config.base.name), Kind):
        return given
    return of(config.base, task.base_kind).load(config, task, device)
