"""Pages of the documentation site that are made of the program: one per method, and the Python interface."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import settings_page
import site_links

import llm_fed
from llm_fed import methods as builtin
from llm_fed.federation.aggregation import averages
from llm_fed.method import Method
from llm_fed.method.merge import Merge

Page = tuple[str, str, str]  # title, place in the site, text
DOCS = site_links.ROOT / "docs"
MODULES = {  # what a method, a task or a program of one's own imports, beside `llm_fed` itself
    "method": "Method: the steps of a method and its declarations",
    "method.merge": "Merger: a function that merges two models, and its declarations",
    "method.site": "Site: one client, or the server, as a method sees it",
    "state": "State: numbers by entry, and arithmetic on them",
    "settings": "Settings: types and ranges of a method's fields",
    "basics.errors": "Errors",
    "merge.*": "Merge: pure functions that merge states",
    "tasks.common": "Tasks: examples and clients",
}
_LINE = re.compile(r"^\| `([\w+-]+)`(?:, `[\w+-]+`)* \| ", re.MULTILINE)
_NAMED = re.compile(r"docs/([\w/]+\.md)")


@cache
def methods() -> list[Page]:
    """A page for each method of llm_fed, in the order of the alphabet."""
    rows = {described["name"]: described for described in builtin.builtin()}
    return [(name, _uri(name), _method_page(rows[name])) for name in sorted(rows)]


def linked(text: str) -> str:
    """The list of all methods, with a link from each name to its page."""
    return _LINE.sub(lambda match: match[0].replace(f"`{match[1]}`", f"[`{match[1]}`]({_uri(match[1])})", 1), text)


@cache
def interface() -> list[Page]:
    """Pages of the Python interface: `llm_fed` itself, and a page per module of MODULES."""
    names = "\n\n".join(f"::: {home}.{name}" for name, home in llm_fed._HOMES.items())
    first = "# llm_fed\n\nWhat `import llm_fed` offers; its use is on [a page of its own](../python.md).\n\n"
    pages = [("llm_fed", "api/index.md", f"{first}{names}\n")]
    for module, title in MODULES.items():
        package, whole = module.removesuffix(".*"), module.endswith(".*")
        files = sorted((site_links.ROOT / "llm_fed" / package).glob("[!_]*.py"))
        parts = [f"{package}.{path.stem}" for path in files] if whole else [module]
        shown = "\n\n".join(_documented(part) for part in parts)
        name = title.partition(":")[0]
        pages.append((name, f"api/{name.lower()}.md", f"# {title}\n\n{shown}\n"))
    return pages


def _documented(module: str) -> str:
    """Of a module of llm_fed what mkdocstrings finds; `tasks` and `eval` lie beside the package in the repository."""
    path = module if module.startswith(("tasks", "eval")) else f"llm_fed.{module}"
    return f"## `llm_fed.{module}`\n\n::: {path}\n    options: {{show_root_heading: false, heading_level: 3}}"


def _uri(name: str) -> str:
    return f"methods/{name.replace('+', '-')}.md"


def _method_page(described: dict[str, Any]) -> str:
    name, kind = described["name"], builtin.BUILTIN[described["name"]]
    path = Path(inspect.getfile(kind)).relative_to(site_links.ROOT).as_posix()
    paper, *more = _paragraphs(inspect.getdoc(inspect.getmodule(kind)) or "")
    idea, deviations = _said(inspect.getdoc(kind) or "")
    aliases = ", ".join(f"`{alias}`" for alias in described["aliases"])
    when, measured, *_ = _row("methods.md", name)
    (formulas,) = _row("formulas.md", name)
    parts = [
        f"# {name}",
        *idea,
        *more,
        f"It is also called {aliases}." if aliases else "",
        f"**Paper.** {kind.paper}. {paper}",
        f"## When to use it\n\nUse it {when}.\n\n**Measured here:** {measured or 'not on real data'}.",
        "## Formulas\n\n" + "\n".join(f"- {each}" for each in formulas.split("; ")),
        "The page of [all formulas](../formulas.md) explains the symbols.",
        f"## Settings\n\n{_settings(described, kind)}",
        f"## Properties\n\n{_declared(name)}",
        "## Where it differs from the paper\n\n" + "\n".join(f"- {each}" for each in deviations) if deviations else "",
        f"## The code\n\nIt is in [{path}](../../{path}). Comments refer to the paper's equations.",
        f"```python\n{_code(kind)}```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _settings(described: dict[str, Any], kind: type[Method]) -> str:
    """Those of the method alone, with the comments at its fields."""
    name, comments = (
        described["name"],
        {**settings_page.comments_of(Merge), **settings_page.comments_of(_written(kind))},
    )
    if not described["settings"]:
        return f"`method={name}` has only the [settings of every run](../configuration.md)."
    rows = []
    for key, default in described["settings"].items():
        shown, must_be = json.dumps(default).strip('"'), described["ranges"].get(key) or ""
        rows.append(f"| `{key}` | `{shown}` | {_plain(must_be)} | {_plain(comments.get(key, ''))} |")
    first = next(iter(described["settings"]))
    head = f"Set them as in `method={name} method.{first}=...`, with the [settings of every run](../configuration.md)."
    return "\n".join([head, "", "| setting | default | may be | meaning |", "|---|---|---|---|", *rows])


def _declared(name: str) -> str:
    """What the method says of itself, as sentences."""
    method = builtin.build({"name": name})
    kinds = {"LoRA adapters": method.adapters_only, "whole image models": method.whole_models}
    trains = next((what for what, only in kinds.items() if only), "adapters and whole image models")
    parents = " and ".join(f"`{parent.name}`" for parent in method.parents)
    facts = {
        f"It trains {trains}.": True,
        f"It merges the results of runs of {parents}, without rounds of its own.": bool(parents),
        "Clients' adapters may differ in rank (`adapter.rank`).": method.any_rank,
        "Clients' models may differ (`base.clients`).": method.any_model,
        "All clients get the same model, so the server can test it on its own data.": method.one_model,
        "[Robust means](../robust.md) are supported (`server.aggregation`).": averages(method),
        "Central [differential privacy](../privacy.md) is supported (`privacy.where=server`).": method.mean_only,
        "DP-SGD (`privacy.unit=example`) is refused: clients use examples for more than training.": method.looks,
    }
    return "\n".join(f"- {fact}" for fact, holds in facts.items() if holds)


def _said(docstring: str) -> tuple[list[str], list[str]]:
    """The paragraphs that a docstring has on the method, and its deviations from the paper, as Markdown."""
    idea: list[str] = []
    deviations: list[str] = []
    for paragraph in docstring.split("\n\n"):
        first, *others = re.split(r"^Deviation(?:: |, )", paragraph, flags=re.MULTILINE)
        idea += _paragraphs(first)
        deviations += [text[:1].upper() + text[1:] for other in others for text in _paragraphs(other)]
    return idea, deviations


def _paragraphs(text: str) -> list[str]:
    return [_plain(" ".join(paragraph.split())) for paragraph in text.split("\n\n") if paragraph.strip()]


def _plain(text: str) -> str:
    """Markdown that shows a text as it is, but for `code`, and with links to the pages that it names."""
    parts = text.split("`")
    parts[::2] = [_NAMED.sub(r"[\1](../\1)", re.sub(r"([<>*_|\[\]\\])", r"\\\1", part)) for part in parts[::2]]
    return "`".join(parts)


def _row(page: str, name: str) -> list[str]:
    """What a table of a page says of a method, with links as from the method's page."""
    text = site_links.moved((DOCS / page).read_text(), f"docs/{page}", f"docs/{_uri(name)}")
    match = re.search(rf"^\| `{re.escape(name)}`[^|]*\| (.*) \|$", text, re.MULTILINE)
    if match is None:
        raise LookupError(f"docs/{page} has no row that begins with | `{name}` |; add one")
    return re.split(r" \| ", match[1])


def _written(kind: type[Method]) -> Any:
    """What its file holds: the class of a method, the function of a merger."""
    return getattr(kind, "function", kind)


def _code(kind: type[Method]) -> str:
    """What its file holds without the docstring, and the other functions of its module."""
    written = _written(kind)
    source = re.sub(r'^    """.*?"""\n\n?', "", inspect.getsource(written), count=1, flags=re.MULTILINE | re.DOTALL)
    module = inspect.getmodule(kind)
    assert module is not None
    functions = [
        each
        for _, each in inspect.getmembers(module, inspect.isfunction)
        if each.__module__ == kind.__module__ and not hasattr(each, "merge")
    ]
    functions.sort(key=lambda each: each.__code__.co_firstlineno)
    return "\n\n".join([source, *(inspect.getsource(each) for each in functions)])
