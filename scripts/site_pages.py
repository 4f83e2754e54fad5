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
from llm_fed.method import Method

Page = tuple[str, str, str]  # title, place in the site, text
DOCS = site_links.ROOT / "docs"
MODULES = {  # what a method, a task or a program of one's own imports, beside `llm_fed` itself
    "method": "Method: the steps of a method and its declarations",
    "site": "Site: one client, or the server, as a method sees it",
    "state": "State: numbers by entry, and arithmetic on them",
    "settings": "Settings: types and ranges of a method's fields",
    "errors": "Errors",
    "merge": "Merge: pure functions that merge states",
    "tasks.common": "Tasks: examples and clients",
}
_LINE = re.compile(r"^\| `([\w+-]+)`(?:, `[\w+-]+`)* \| ", re.MULTILINE)
_NAMED = re.compile(r"\(?docs/([\w/]+\.md)\)?")


@cache
def methods() -> list[Page]:
    """A page for each method of llm_fed, in the order of the alphabet."""
    rows = {described["name"]: described for described in builtin.builtin()}
    return [(name, _uri(name), _method_page(rows[name])) for name in sorted(rows)]


def linked(text: str) -> str:
    """The list of all methods, with a link from each name to its page."""
    return _LINE.sub(lambda found: found[0].replace(f"`{found[1]}`", f"[`{found[1]}`]({_uri(found[1])})", 1), text)


@cache
def interface() -> list[Page]:
    """Pages of the Python interface: `llm_fed` itself, and a page per module of MODULES."""
    names = "\n\n".join(f"::: {home}.{name}" for name, home in llm_fed._HOMES.items())
    first = "# llm_fed\n\nWhat `import llm_fed` offers; its use is in the [guide](../guide.md#from-python).\n\n"
    pages = [("llm_fed", "api/index.md", f"{first}{names}\n")]
    for module, title in MODULES.items():
        package = site_links.ROOT / "llm_fed" / module
        parts = [f"{module}.{path.stem}" for path in sorted(package.glob("[!_]*.py"))] or [module]
        shown = "\n\n".join(_documented(part) for part in parts)
        pages.append((title.partition(":")[0], f"api/{module.partition('.')[0]}.md", f"# {title}\n\n{shown}\n"))
    return pages


def _documented(module: str) -> str:
    """Of a module of llm_fed what mkdocstrings finds; `tasks` and `eval` lie beside the package in the repository."""
    path = module if module.startswith(("tasks", "eval")) else f"llm_fed.{module}"
    return f"## `llm_fed.{module}`\n\n::: {path}\n    options: {{show_root_heading: false, heading_level: 3}}"


def _uri(name: str) -> str:
    return f"methods/{name.replace('+', '-')}.md"


def _method_page(described: dict[str, Any]) -> str:
    name, kind = described["name"], builtin.METHODS[described["name"]]
    path = Path(inspect.getfile(kind)).relative_to(site_links.ROOT).as_posix()
    idea, deviations = _said(inspect.cleandoc(kind.__doc__ or ""))
    paper = _plain(" ".join(inspect.cleandoc(inspect.getmodule(kind).__doc__ or "").split("\n\n")[0].split()))
    also = (
        f" It is also called {', '.join(f'`{alias}`' for alias in described['aliases'])}."
        if described["aliases"]
        else ""
    )
    when, measured = _row("choosing.md", name)
    parts = [
        f"# {name}\n\n{idea}{also}",
        f"**Paper.** {kind.paper}. From the module: {paper}",
        f"## When to use it\n\n{_capital(when)}\n\n**What we measured.** {_capital(measured)}",
        f"## Formulas\n\n{_row('formulas.md', name)[0]}\n\nThe letters are explained in [formulas](../formulas.md).",
        f"## Settings\n\n{_settings(described, kind)}",
        f"## What a run may rely on\n\n{_declared(kind)}",
        "## Where it differs from the paper\n\n" + "\n".join(f"- {each}" for each in deviations) if deviations else "",
        f"## The code\n\nThe class as it stands in [{path}](../../{path}); comments give the paper's equations.\n\n"
        f"```python\n{_code(kind)}```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _settings(described: dict[str, Any], kind: type[Method]) -> str:
    """Those of the method alone, with the comments at its fields."""
    name, comments = described["name"], settings_page.comments_of(kind)
    if not described["settings"]:
        return f"It has none of its own: `llm-fed run mine.yaml method={name}`."
    rows = [
        f"| `{key}` | `{json.dumps(default).strip(chr(34))}` | {(described['ranges'].get(key) or '').replace('|', '&#124;')} "
        f"| {_capital(_plain(comments.get(key, '')))} |"
        for key, default in described["settings"].items()
    ]
    first = next(iter(described["settings"]))
    head = (
        f"Give them as `method={name} method.{first}=...`; [every method has those of a run, too](../configuration.md)."
    )
    return "\n".join([head, "", "| setting | default | may be | meaning |", "|---|---|---|---|", *rows])


def _declared(kind: type[Method]) -> str:
    """What the class says of itself, as sentences."""
    method = builtin.build({"name": next(name for name, its in builtin.METHODS.items() if its is kind)})
    trains = (
        "LoRA adapters"
        if method.adapters_only
        else "whole image models"
        if method.whole_models
        else "adapters and whole image models"
    )
    needs = " and ".join(f"`{need}`" for need in kind.needs)
    facts = {
        f"It merges what runs of {needs} have trained, and has no rounds of its own.": bool(needs),
        f"It is for {trains}.": True,
        "Clients' adapters may differ in rank (`adapter.rank`).": method.any_rank,
        "Clients' models may differ (`base.clients`).": method.any_model,
        "All clients get one model, so the server can test it on data of its own.": method.one_model,
        "Robust means are possible (`server.aggregation`, see [robust means](../robust.md)).": method.robust,
        "Noise at the server is possible (`privacy.where=server`, see [privacy](../privacy.md)).": method.mean_only,
        "Noise in each training step (`privacy.unit=example`) does not cover all that its clients learn.": method.looks,
    }
    return "\n".join(f"- {fact}" for fact, holds in facts.items() if holds)


def _said(docstring: str) -> tuple[str, list[str]]:
    """What a docstring says of the method, and its deviations from the paper, each as Markdown."""
    idea, deviations = [], []
    for paragraph in docstring.split("\n\n"):
        first, *others = re.split(r"^Deviation(?:: |, )", paragraph, flags=re.MULTILINE)
        idea += [_plain(" ".join(first.split()))] if first.strip() else []
        deviations += [_capital(_plain(" ".join(each.split()))) for each in others]
    return "\n\n".join(idea), deviations


def _plain(text: str) -> str:
    """Markdown that shows a text as it is, but for `code`, and with links to the pages that it names."""
    parts = text.split("`")
    parts[::2] = [_NAMED.sub(r"[\1](../\1)", re.sub(r"([<>*_|\[\]\\])", r"\\\1", part)) for part in parts[::2]]
    return "`".join(parts)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _row(page: str, name: str) -> list[str]:
    """What a table of a page says of a method, with links as from the method's page."""
    text = site_links.moved((DOCS / page).read_text(), f"docs/{page}", f"docs/{_uri(name)}")
    found = re.search(rf"^\| `{re.escape(name)}` \| (.*) \|$", text, re.MULTILINE)
    if found is None:
        raise LookupError(f"docs/{page} has no row that begins with | `{name}` |; add one")
    return re.split(r" \| ", found[1])


def _code(kind: type[Method]) -> str:
    """The class without its docstring, and the functions of its module."""
    source = inspect.getsource(kind)
    source = source.replace(f'"""{kind.__doc__}"""', '"""..."""', 1)
    module = inspect.getmodule(kind)
    functions = [
        each for _, each in inspect.getmembers(module, inspect.isfunction) if each.__module__ == module.__name__
    ]
    functions.sort(key=lambda each: each.__code__.co_firstlineno)
    return "\n\n".join([source, *(inspect.getsource(each) for each in functions)])
