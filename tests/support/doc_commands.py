"""The commands in blocks of code of the pages: taken apart as a shell would, and checked without being run."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import typer.main

from llm_fed import cli
from llm_fed.commands import section
from llm_fed.settings import configfile, shipped

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    if not path.name.lower().startswith("changelog")
)
OURS = ("scripts/", "tests/", "examples/")
WITH_SETTINGS = ("run", "compare", "flower")


def _doc_blocks() -> ModuleType:
    """scripts/doc_blocks.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("doc_blocks", ROOT / "scripts/doc_blocks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["doc_blocks"] = module
    spec.loader.exec_module(module)
    return module


doc_blocks = _doc_blocks()
BLOCKS = [block for page in PAGES for block in doc_blocks.blocks(page, (ROOT / page).read_text())]


@dataclass(frozen=True)
class Command:
    """One command of a line, with the variables before it and what is piped into it."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    piped: Command | None = None


def commands(code: str) -> list[Command]:
    """Of a block of bash. Variables that it sets are put into the words that name them. ValueError: an open quote."""
    found: list[Command] = []
    known: dict[str, str] = {}
    for line in _lines(code):
        piped = None
        for words, joined in _parted(line):
            variables = {}
            while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0], re.DOTALL):
                name, _, variables[name] = words.pop(0).partition("=")
            if not words:
                known |= variables
                continue
            words = [word for given in words for word in (known[given[1:]].split() if given[1:] in known else [given])]
            command = Command(words, variables, piped)
            piped = command if joined == "|" else None
            if joined != "|":
                found.append(command)
    return found


def _lines(code: str) -> list[str]:
    """Commands, each on one line: joined where a backslash or an open quote ends a line."""
    lines: list[str] = []
    open_line = ""
    for line in code.replace("\\\n", " ").splitlines():
        open_line = f"{open_line} {line}".strip()
        try:
            shlex.split(open_line, comments=True)
        except ValueError:
            continue
        lines, open_line = [*lines, open_line], ""
    if open_line:
        raise ValueError(f"a quote is not closed in {open_line}")
    return [line for line in lines if line and not line.startswith("#")]


def _parted(line: str) -> list[tuple[list[str], str]]:
    """The words of the commands in a line, each with what stands behind it: |, && or nothing."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&")
    lexer.whitespace_split = True
    parts: list[tuple[list[str], str]] = [([], "")]
    for token in lexer:
        if token in ("|", "&&"):
            parts[-1] = (parts[-1][0], token)
            parts.append(([], ""))
        else:
            parts[-1][0].append(token)
    return parts


def check(command: Command) -> bool:
    """Whether it is one of ours; if so it exists, and so do its options and settings.

    Raises:
        Exception: what the program itself would say, or an AssertionError.
    """
    if command.piped:
        check(command.piped)
    words = command.words
    if words[0] == "accelerate":
        config = words[words.index("--config_file") + 1]
        assert (ROOT / config).is_file(), config
        module = "--module" in words
        start = words.index("llm_fed.cli" if module else "scripts/train.py") + 1
        words = ["llm-fed", *([] if module else ["run"]), *words[start:]]
    if words[0] == "llm-fed":
        check_llm_fed(words[1:])
        return True
    if words[0] == "nice":
        words = words[3:]
    if words[:2] == ["python", "-m"] and words[2].startswith("llm_fed"):
        assert importlib.util.find_spec(words[2]), words[2]
        return True
    script = next((word for word in words[:2] if word.startswith(OURS) and word.endswith((".py", ".sh"))), None)
    if not script:
        return False
    source, rest = _source(ROOT / script), words[words.index(script) + 1 :]
    if passed_on := re.search(r'main\(\["(\w+)", \*sys\.argv', source):
        check_llm_fed([passed_on[1], *rest])
    elif "argparse" in source:
        check_script(ROOT / script, rest)
    else:
        options = [word.partition("=")[0] for word in rest if word.startswith("--")]
        known = [
            f'"{option}"' in source or f"{option})" in source for option in options
        ]  # Python's, and a shell's case
        assert all(known), f"{script} {options}"
    return True


def _source(script: Path) -> str:
    """Of a script and of the scripts beside it that it imports, which may have its options."""
    text = script.read_text()
    beside = {found[1] for found in re.finditer(r"^(?:from|import) (\w+)", text, re.MULTILINE)}
    return text + "".join(path.read_text() for path in script.parent.glob("*.py") if path.stem in beside)


def check_script(script: Path, words: list[str]) -> None:
    """By the script's own parser, at which it ends. ValueError: what the parser says of the words."""

    class Parsed(Exception):
        pass

    def parsed_by(parse: Callable[..., object]) -> Callable[..., NoReturn]:
        def parsed(*given: object, **named: object) -> NoReturn:
            parse(*given, **named)
            raise Parsed

        return parsed

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ValueError(f"{script.relative_to(ROOT)}: {message}")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, parsed_by(getattr(argparse.ArgumentParser, name)))
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        patch.setattr(sys, "argv", [str(script), *words])
        patch.syspath_prepend(str(script.parent))
        with contextlib.suppress(Parsed):
            runpy.run_path(str(script), run_name="__main__")
            raise AssertionError(f"{script} reads no options")


def check_llm_fed(words: list[str]) -> None:
    """By the command line's own parser, and the settings by the configuration: of a file that llm_fed ships all of it.

    Raises:
        Exception: click's for a command or an option that there is not; UserError for a setting.
    """
    name, *rest = words
    command = typer.main.get_command(cli.app).commands[name]
    given = command.make_context(name, list(rest)).params
    if name not in WITH_SETTINGS or given.get("runs"):
        return
    settings = [*(given["settings"] or [])]
    file = ROOT / given["config"]
    if not file.is_file():
        file = shipped.files().get(Path(given["config"]).name)
    if file is None:
        configfile.keys_of(settings, "the configuration")
    elif name == "compare":
        chosen = [label for label in (given["methods"] or "").split(",") if label]
        section.read_rows(file, settings, chosen, [0])
    else:
        configfile.load(file, settings)
