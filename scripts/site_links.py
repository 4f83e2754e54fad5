"""Where a file of the repository stands in the documentation site, and links that lead there.

Pages link to each other, and to files of the repository, as they lie on the disk; so the links work where the
repository is read. In the site a page from outside docs/ has a place of its own, and any other file is a page that
shows it, so that a link leads to the file as it was when the page was written. So is a page of docs/ that mkdocs.yml
leaves out of the site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from mkdocs.utils.yaml import yaml_load
from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[1]
PAGES = {  # that do not lie in docs/, and their places in the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/personal_methods/README.md": "examples/personal_methods.md",
    "examples/data_frame.ipynb": "examples/data_frame.md",
}
FENCED = re.compile(r"(^ *(`{3,}|~{3,}).*?^ *\2 *$)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"(\]\([^)#\s]*source/[^)#\s]+\.md)#[^)\s]+(?=\))")  # of a page that is shown as a file
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))|(?<=<img src=\")([^\"]+)")
_HEAD = "---\nsearch: {exclude: true}\n---\n"  # who searches the site does not search the program
_ABOUT = 110  # characters of a file's first line


def place(path: str) -> str:
    """The page or file of the site that shows a path of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and not _left_out().match_file(path.removeprefix("docs/")):
        return path.removeprefix("docs/")
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def origin(src_uri: str) -> str:
    """The path in the repository whose links a page of the site has; of a generated one where it would lie."""
    paths = {uri: path for path, uri in PAGES.items()}
    return paths.get(src_uri, f"docs/{src_uri}")


def placed(text: str, path: str) -> str:
    """The text of the page at a path of the repository, with links for its place in the site."""
    here = os.path.dirname(place(path))
    changed = _changed(text, lambda target: os.path.relpath(place(_beside(path, target)), here or "."))
    return _HEADING.sub(r"\1", changed)


def moved(text: str, path: str, to: str) -> str:
    """A part of the page at `path`, with links as from the page at `to`."""
    return _changed(text, lambda target: os.path.relpath(_beside(path, target), os.path.dirname(to)))


def sources(pages: dict[str, str]) -> dict[str, str]:
    """The pages that show what pages link to and the site has not, by their places: files, and folders with theirs.

    Args:
        pages: texts by path in the repository.
    """
    wanted = {_beside(path, target) for path, text in pages.items() for target in _targets(text)}
    outside = sorted(path for path in wanted if (ROOT / path).exists() and place(path).startswith("source/"))
    folders = [path for path in outside if (ROOT / path).is_dir()]
    files = {path for path in outside if path not in folders} | {each for path in folders for each in _within(path)}
    return {place(path): _file_page(path) for path in sorted(files)} | {
        place(path): _folder_page(path) for path in folders
    }


def _targets(text: str) -> Iterable[str]:
    targets: list[str] = []

    def noted(target: str) -> str:
        targets.append(target)
        return target

    _changed(text, noted)
    return targets


def _changed(text: str, change: Callable[[str], str]) -> str:
    """With other targets in the place of the relative links outside of blocks of code."""

    def other(match: re.Match[str]) -> str:
        target, sign, anchor = match[0].partition("#")
        return match[0] if not target or ":" in target else change(target) + sign + anchor

    parts = FENCED.split(text)  # text, block, its fence, text, ...
    return "".join(_LINK.sub(other, part) if n % 3 == 0 else part for n, part in enumerate(parts) if n % 3 < 2)


@cache
def _left_out() -> GitIgnoreSpec:
    """The pages of docs/ that mkdocs.yml leaves out."""
    return GitIgnoreSpec.from_lines(yaml_load((ROOT / "mkdocs.yml").read_text())["exclude_docs"].splitlines())


def _beside(path: str, target: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(path), target))


def _within(folder: str) -> list[str]:
    paths = sorted(each for each in (ROOT / folder).iterdir() if each.suffix in (".py", ".yaml"))
    return [path.relative_to(ROOT).as_posix() for path in paths]


def _file_page(path: str) -> str:
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(Path(path).suffix, "text")
    return f'{_HEAD}\n# `{path}`\n\n~~~~~~ {{.{language} linenums="1"}}\n{(ROOT / path).read_text()}\n~~~~~~\n'


def _folder_page(path: str) -> str:
    lines = [f"- [{Path(each).name}]({Path(each).name}.md): {_about(ROOT / each)}" for each in _within(path)]
    return f"{_HEAD}\n# `{path}`\n\n" + "\n".join(lines) + "\n"


def _about(path: Path) -> str:
    """The first line of a file without its quotes and signs; of an empty one nothing."""
    first = next(iter(path.read_text().splitlines()), "").strip('#" ')
    return re.sub(r"([<>*_\[\]])", r"\\\1", first[:_ABOUT]) + ("…" if len(first) > _ABOUT else "")
