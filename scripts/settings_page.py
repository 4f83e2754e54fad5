"""The page of all settings of a run, from the fields of the configuration's classes and the comments beside them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import tokenize
from typing import Any

from llm_fed import config
from llm_fed.configfile import as_dict
from llm_fed.settings import hints, range_of

HEAD = """# Every setting of a run

A configuration is a YAML file of these keys; on the command line they are words such as `local.lr=1e-4`. What a file
leaves out has its default. A mistyped key names the closest, and a value out of range says what is allowed. The
settings of each method are in [methods.md](methods.md).

This page is written by `python scripts/lists.py` from [llm_fed/config.py](../llm_fed/config.py).
"""
_SMALL = 3  # a section with so few keys stands among those of the run
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
            rows[0][3] = f"{_about(kind)} {rows[0][3]}".strip()
            small += rows
        else:
            parts.append(f"\n## `{name}`\n\n{_wrapped(_about(kind))}\n\n{_table(rows)}")
    return HEAD + "\n## The run\n\n" + _table([*top, *small]) + "".join(parts)


def comments_of(kind: type) -> dict[str, str]:
    """By field of a class what its comments say: those above it, and then the one behind it."""
    source = inspect.getsource(kind)
    said = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.lstrip("# ").startswith(_SKIP)
    }
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    found, done = {}, body.lineno
    for node in body.body:
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = " ".join(said[line] for line in range(done + 1, last + 1) if line in said)
        done = last
    return found


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
    allowed = range_of(hint)
    shown = json.dumps(default, ensure_ascii=False).strip('"')
    return [f"`{key}`", f"`{shown}`", allowed.replace("|", "\\|"), _sentence(comment)]


def _sentence(comment: str) -> str:
    return (comment[:1].upper() + comment[1:]).replace("|", "\\|").replace("*", "\\*")


def _table(rows: list[list[str]]) -> str:
    lines = [["key", "default", "may be", "meaning"], ["---"] * 4, *rows]
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
