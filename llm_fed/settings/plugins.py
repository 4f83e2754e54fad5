"""Methods, tasks, kinds of model and metrics from outside llm_fed, by name: `package.module:Name`, or an entry point of
an installed package.

To name one is to run the code of its module. A process that another party tells what to do says by `only` which names
it may look up; nothing else is imported then. A run folder may be another party's as well: `check_folder` refuses what
it names, unless the user has said by `allowing` that this code may run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from llm_fed.basics.errors import UserError, did_you_mean
from llm_fed.settings import objects

# Groups of entry points.
METHODS, TASKS, KINDS, METRICS = "llm_fed.methods", "llm_fed.tasks", "llm_fed.kinds", "llm_fed.metrics"
EVALUATE = "evaluate:"  # what the name of a metric of the library evaluate begins with; it runs a script, too

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
# Where a configuration names something from outside, by key.
GROUP = {
    "method.name": METHODS, "task.name": TASKS, "task.server.name": TASKS, "base.kind": KINDS, "eval.metric": METRICS,
}  # fmt: skip
_allowed: ContextVar[Collection[str] | None] = ContextVar("_allowed", default=None)  # None: every name
_trusted: ContextVar[frozenset[str]] = ContextVar("_trusted", default=frozenset())  # also where a folder names them


class NotAllowed(UserError):
    """The name of something from outside that another party may not name here."""


def find(key: str, name: str, group: str, builtin: Collection[str]) -> Any:
    """What a name that is not built in stands for, as the value of `key` and in a `group`, such as METHODS.
    Modules are looked for where Python looks, and last in the working directory. NotAllowed: see `only`; UserError
    where nothing has this name, and which are known, or where its module cannot be imported."""
    if objects.is_object(name):
        return objects.find(key, name)
    path = _path_of(name, group)
    if path is None:
        known = [*builtin, *names(group)]
        raise UserError(
            f"{key}={name!r} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}, and your own as "
            "package.module:Name"
        )
    check_allowed(key, name, group)
    return _load(f"{key}={name!r}" if path == name else f"{key}={name!r} ({path})", path)


def check_allowed(key: str, name: str, group: str) -> None:
    """NotAllowed where this process may not look up what is named so, see `only`."""
    allowed = _allowed.get()
    own = _path_of(name, group) or name
    if allowed is not None and own not in {*allowed, *(_path_of(each, group) for each in allowed)}:
        raise NotAllowed(
            f"{key}={name!r} is not built into llm_fed, and to name it runs its code, which this machine's operator "
            f"has not allowed (allowed: {', '.join(allowed) or 'nothing'}); on a node of Flower, install it and add "
            f"""allow="{name}" to --node-config"""
        )


def only(allowed: Collection[str]) -> AbstractContextManager[None]:
    """Within it, what happens on behalf of another party: of names from outside only these are looked up."""
    return objects.within(_allowed, tuple(allowed))


def allowing(names: Collection[str]) -> AbstractContextManager[None]:
    """Within it, run folders may name these as well, as `module:Name`: the user knows whose code that is."""
    return objects.within(_trusted, _trusted.get() | frozenset(names))


def is_named(key: str, name: object) -> bool:
    """Whether the value of a key names code outside llm_fed, as `module:Name`, or as a metric of evaluate."""
    return key in GROUP and isinstance(name, str) and bool(_PATH.fullmatch(name) or name.startswith(EVALUATE))


def named_in(tree: Mapping[str, Any]) -> dict[str, str]:
    """By key what a configuration, as nested plain values, names as `module:Name`."""
    named = {}
    for key in GROUP:
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if is_named(key, value):
            named[key] = value
    return named


def check_folder(file: Path, tree: Mapping[str, Any]) -> None:
    """NotAllowed where the configuration of a folder, in this `file`, names code that neither an installed package
    publishes as an entry point nor the user allows, and how to allow it. Nothing is imported."""
    base = tree.get("base")
    name = str(base.get("name")) if isinstance(base, Mapping) else ""
    if os.path.isdir(name) and Path(os.path.realpath(name)).is_relative_to(os.path.realpath(file.parent)):
        check_brought(file, f"base.name={name!r}, which it brings along with its tokenizer and chat template", name)
    if not (named := named_in(tree)):
        return  # without a look at every installed package
    known = {f"{point.module}:{point.attr}" for group in GROUP.values() for point in _installed(group)}
    refused = {key: name for key, name in named.items() if name not in known | _trusted.get()}
    if not refused:
        return
    names = list(dict.fromkeys(refused.values()))
    raise NotAllowed(
        f"{file} names {' and '.join(f'{key}={name!r}' for key, name in refused.items())}, which is not part of "
        "llm_fed, and looking at a run does not run code that its folder names; if you trust that code, add "
        f"{' '.join(f'--allow {name}' for name in names)} (from Python: allow={names})"
    )


def check_brought(file: Path, what: str, name: str) -> None:
    """NotAllowed where a file of a folder has what takes whatever time and memory it likes, unless the user allows its
    name."""
    if name not in _trusted.get():
        raise NotAllowed(
            f"{file} has {what}, and may take all time and memory; if you trust whoever made it, add --allow {name} "
            f"(from Python: allow=[{name!r}])"
        )


def _installed(group: str) -> Iterator[EntryPoint]:
    """The entry points of a group, but for packages in the working directory, where anybody's files may be."""
    here = os.path.realpath(os.getcwd())
    for point in entry_points(group=group):
        if point.dist is None or os.path.realpath(str(point.dist.locate_file(""))) != here:
            yield point


def names(group: str) -> list[str]:
    """What the entry points of a group are called, of all installed packages. Nothing is imported."""
    return sorted(entry_points(group=group).names)


def describe(group: str, builtin: Collection[str], row: Callable[[str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each entry point of a group, for lists of what can be named: what `row` shows of its name, or what is
    wrong with it, also where the name is `builtin`, and so stands for something of llm_fed."""
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        name, package = point.name, _package_of(point)
        try:
            if name in builtin:
                path = f"{point.module}:{point.attr}"
                raise UserError(f"{name} is built into llm_fed, so this one is found as {path} alone")
            yield {**row(name), "package": package}
        except UserError as error:
            yield {"name": name, "package": package, "wrong": str(error)}


def path_of(thing: Any) -> str:
    """`module:Class`, which does not depend on the name by which a class was found."""
    return f"{thing.__module__}:{thing.__qualname__}"


def short(name: str) -> str:
    """A name for files and folders: of `package.module:Name` the Name."""
    return name.rpartition(":")[2]


def place_of(error: BaseException, module: str) -> str:
    """Where an error left the code of a module's package, as `file, line n (its text)`; the module where it did not."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno} ({(error.text or '').strip()})"
    spec = importlib.util.find_spec(module.partition(".")[0])
    own = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(location and frame.filename.startswith(location) for location in own)
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].line})" if frames else module


def _path_of(name: str, group: str) -> str | None:
    """`module:Name`; None where nothing has this name. UserError where two packages use it."""
    if _PATH.fullmatch(name):
        return name
    points = entry_points(group=group).select(name=name)
    paths = {f"{point.module}:{point.attr}": _package_of(point) for point in points}
    if len(paths) > 1:
        each = " or ".join(f"{path} (of {package})" for path, package in paths.items())
        raise UserError(f"{name!r} is a name in several installed packages; give the one that you mean: {each}")
    return next(iter(paths), None)


def _package_of(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an installed package"


def _load(where: str, path: str) -> Any:
    """The attribute of the module; UserError where there is none, or the module fails while it is imported."""
    name, _, attribute = path.partition(":")
    try:
        with _looking_here(for_a_moment=path in _trusted.get()):
            value: Any = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            here = [path.stem for path in Path.cwd().glob("*.py")]
            here += [path.parent.name for path in Path.cwd().glob("*/__init__.py")]
            near = did_you_mean(str(error.name), here)
            raise UserError(
                f"{where}: python finds no module {error.name}{near}, neither in {os.getcwd()} nor among what is "
                f"installed for {sys.executable}; start from the folder in which it lies, or install its package"
            ) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{where}: {place_of(error, name)} fails when {name} is imported: {reason}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [each for each in vars(value) if not each.startswith("_")]
            raise UserError(f"{where}: {_file_of(value)} has no {part!r}{did_you_mean(part, names)}")
        value = getattr(value, part)
    return value


@contextmanager
def _looking_here(for_a_moment: bool) -> Iterator[None]:
    """Within it, and else from then on, modules are looked for in the working directory, too, last, to shadow nothing;
    a program that is started by its name does not look there by itself. Where the user has allowed one name of a
    folder, no other module must be found there."""
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        if for_a_moment:
            sys.path.remove(here)


def _file_of(thing: Any) -> str:
    if isinstance(thing, ModuleType):
        return getattr(thing, "__file__", None) or f"the namespace package {thing.__name__}"
    return path_of(thing) if isinstance(thing, type) else repr(thing)
