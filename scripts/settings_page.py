"""The page of all settings of a run, from the fields of the configuration's classes and the comments beside them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import tokenize
from typing import Any

from llm_fed.settings import config, hints, range_of
from llm_fed.settings.configfile import as_dict

HEAD = """# Every setting of a run

A configuration is a YAML file with any of these keys; the others have their defaults. On the command line a key is
written as `local.lr=1e-4`. The settings of each method are in [methods.md](methods.md).

A text, such as a name, a path or a template, is taken as it stands: a client may be called `no`, `11` or `1e5`. On
the command line only the shell needs quotes: `'task.template=Question: {prompt}\\n'`. Lists of names stand in
brackets: `task.groups=[no,'a, b']`. `${rounds}` is the value of another key, and `${oc.env:DATA,null}` a path from the
environment.

`python scripts/lists.py` writes this page from [llm_fed/settings/config.py](../llm_fed/settings/config.py).
"""
_SMALL = 7  # a section with so few keys stands among those of the run
_SKIP = ("fmt:", "type:", "noqa")  # comments to tools


def page() -> str:
    """The whole page."""
    defaults = as_dict(config.Config())
    comments, types = comments_of(config.Config), hints(config.Config)
    top, small, parts = [], [], []
    for field in dataclasses.fields(config.Config):
        name, kind = field.name, _section(field)
        if kind is None:
            top.append(_row(name, defaults[name], types[name], comments.get(name, "")))
            continue
        rows = _rows(name, kind, defaults[name])
        if len(rows) <= _SMALL:
            rows[0][2] = f"{_about(kind)} {rows[0][2]}".strip()
            small += rows
        else:
            parts.append(f"\n## `{name}`\n\n{_wrapped(_about(kind))}\n\n{_table(rows)}")
    return HEAD + "\n## The run\n\n" + _table([*top, *small]) + "".join(parts)


def comments_of(kind: Any) -> dict[str, str]:
    """By field of a class, or by keyword argument of a function, what its comments say: those above it, and then the
    one behind it."""
    source = inspect.getsource(kind)
    said = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.lstrip("# ").startswith(_SKIP)
    }
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    comments, done = {}, body.lineno
    for node in body.body if isinstance(body, ast.ClassDef) else body.args.kwonlyargs:
        last = node.end_lineno or node.lineno
        name = node.arg if isinstance(node, ast.arg) else getattr(getattr(node, "target", None), "id", None)
        if name:
            comments[name] = " ".join(said[line] for line in range(done + 1, last + 1) if line in said)
        done = last
    return comments


def _section(field: dataclasses.Field[Any]) -> type | None:
    """The dataclass that a field of the configuration holds; of `adapter` that which it may hold."""
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return type(made) if dataclasses.is_dataclass(made) else None


def _about(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


def _rows(prefix: str, kind: type, defaults: dict[str, Any]) -> list[list[str]]:
    comments, types, rows = comments_of(kind), hints(kind), []
    for field in dataclasses.fields(kind):
        key = field.name.rstrip("_")
        value = defaults[field.name] if field.name in defaults else defaults[key]
        inner = _section(field)
        if inner is not None:
            rows += _rows(f"{prefix}.{key}", inner, value)
        else:
            rows.append(_row(f"{prefix}.{key}", value, types[field.name], comments.get(field.name, "")))
    return rows


def _row(key: str, default: Any, hint: Any, comment: str) -> list[str]:
    shown = json.dumps(default, ensure_ascii=False).strip('"')
    return [f"`{key}`", "; ".join(part for part in (f"`{shown}`", _short(range_of(hint))) if part), _sentence(comment)]


def _short(allowed: str) -> str:
    """A range in signs."""
    for words, sign in (("at least ", "≥"), ("at most ", "≤"), ("above ", ">"), ("below ", "<"), (" and finite", "")):
        allowed = allowed.replace(words, sign)
    return allowed.replace("|", "\\|")


def _sentence(comment: str) -> str:
    return (comment[:1].upper() + comment[1:]).replace("|", "\\|").replace("*", "\\*")


def _table(rows: list[list[str]]) -> str:
    lines = [["key", "default; range", "meaning"], ["---"] * 3, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _wrapped(text: str, width: int = 118) -> str:
    lines: list[str] = []
    line = ""
    for word in text.split():
        if len(line) + len(word) + 1 > width:
            lines, line = [*lines, line], word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])
