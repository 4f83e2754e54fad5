"""One paper, one file: a method derives from Method alone, a merger is a function, and what two of them share is a
module of functions."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

from llm_fed import mergers, method, methods
from llm_fed.method import Method
from llm_fed.method.merge import Merge

MODULES = [
    importlib.import_module(f"{room.__name__}.{found.name}")
    for room in (mergers, methods)
    for found in pkgutil.iter_modules(room.__path__)
]
OF_METHODS = {kind.__module__ for kind in methods.BUILTIN.values()}


def test_what_a_method_has_is_said_at_its_beginning():
    """The steps in the order of a run, then the declarations that are functions, then the reports."""
    functions = [name for name, thing in vars(Method).items() if callable(thing) and not name.startswith("_")]
    said = re.findall(r"`(\w+)`", method.__doc__.split("Each step takes")[0])
    assert said == functions


def test_a_method_has_no_base_but_method():
    assert {kind.__bases__ for kind in methods.METHODS.values()} == {(Method,)}
    assert {kind.__bases__ for kind in methods.MERGERS.values()} == {(Merge,)}


def test_no_method_imports_another():
    for module in MODULES:
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {
            f"{node.module}.{alias.name}" if node.module == methods.__name__ else node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        } | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not imported & OF_METHODS, module.__name__


def test_what_they_share_is_functions():
    shared = [module for module in MODULES if module.__name__ not in OF_METHODS]
    assert {module.__name__.rpartition(".")[2] for module in shared} >= {"mixing", "waiting"}
    for module in shared:
        own = [thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__]
        assert not [thing for thing in own if isinstance(thing, type) and issubclass(thing, Method)]
