"""The tests' own folders: one for each package that has tests, what they share in one place, and paths that exist; and
the names of classes, each of which means one thing."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MODULES = sorted(path for path in TESTS.rglob("*.py"))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that stand in a module, a class or a function, at any depth; what an expression holds is not looked at."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, part, []))


def imported(path: Path) -> set[str]:
    """The last parts of the names of all modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found |= {name for alias in node.names for name in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            found |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return found


def test_no_module_imports_a_test_module():
    """What two of them share is in tests/support."""
    tests = {path.stem for path in MODULES if path.stem.startswith("test_")}
    assert len(tests) > 50
    named = [path for path in MODULES if tests & {*re.findall(r"\btest_\w+", path.read_text())}]
    assert not {path.name: found for path in named if (found := imported(path) & tests)}


def test_folders_are_those_of_packages():
    """Beside them `support`, whose modules hold no tests of their own, and `end_to_end`, of whole runs."""
    packages = {path.parent.name for path in ROOT.glob("llm_fed/*/__init__.py")} | {"tasks", "eval", "scripts"}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    assert folders <= packages | {"support", "end_to_end"}
    assert not list(TESTS.glob("support/test_*.py"))
    outside = [path for path in MODULES if "support" not in path.parts and not path.stem.startswith("test_")]
    assert outside == [TESTS / "conftest.py"]


def test_paths_of_tests_in_the_documentation_exist():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("scripts/**/*.yaml"), *MODULES]
    named = {name for text in texts for name in re.findall(r"\btests/[\w/]+\.py", text.read_text())}
    assert len(named) > 10 and not {name for name in named if not (ROOT / name).is_file()}


def test_one_parser_reads_yaml():
    """So that its bounds hold for whatever a stranger may have written."""
    houses = [path for house in ("llm_fed", "tasks", "eval") for path in ROOT.glob(f"{house}/**/*.py")]
    reads = [
        path for path in houses if re.search(r"yaml\.(safe_|full_|unsafe_)?(load|compose|parse)", path.read_text())
    ]
    assert [path.name for path in reads] == ["documents.py"]


def test_a_class_name_means_one_thing():
    """A private class does not share its name with another either."""
    houses = [path for house in ("llm_fed", "tasks", "eval") for path in ROOT.glob(f"{house}/**/*.py")]
    classes = [node for path in houses for node in statements(ast.parse(path.read_text()).body)]
    names = Counter(node.name.lstrip("_") for node in classes if isinstance(node, ast.ClassDef))
    assert len(names) > 300
    assert not {name for name, count in names.items() if count > 1}
