"""What all reports share: how numbers are written, and how pictures, data, styles and the script get into one file."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from llm_fed.basics.files import write_result

_HERE = Path(__file__).parent


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write a template of this folder with its values; returns `path`. RunError where it cannot be written."""
    write_result(path, rendered(template, **values).encode(errors="replace"))
    return path


def rendered(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


class _PngBuffer(BytesIO):
    """In the place of a file, since not every machine has a folder for temporary ones."""

    suffix = ".png"


def embed(draw: Callable[..., Path]) -> str:
    """The data URI of a picture, which `draw(path)` writes."""
    picture = _PngBuffer()
    draw(picture)
    return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"size": size, "number": number, "duration": duration, "cell": cell, "prose": prose}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    # These two are part of the program, with no value of a run in them.
    parts = {name: (_HERE / f"report.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    environment.globals |= {name: Markup(text) for name, text in parts.items()}
    return environment


def prose(text: str) -> Markup:
    """A sentence in which code stands between backticks, as in Markdown."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:  # a backtick of the text itself
        return escape(text)
    return Markup("").join(Markup(f"<code>{part}</code>") if number % 2 else part for number, part in enumerate(parts))


def cell(value: float | None, kind: str) -> str:
    """A number of a table by the kind of its column; report.js writes the same."""
    if value is None:
        return "–"
    if kind == "bytes":
        return size(value)
    return number(value, {"bar": 1, "score": 1, "loss": 3, "count": 0}[kind])


def number(value: float | None, digits: int = 1) -> str:
    """With so many decimals; a dash for what is not known or not finite."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def size(count: float) -> str:
    """Bytes with a decimal unit, three digits: 1.23 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds in words: 12.0 s, 4.0 min, 1.5 h."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.1f} s" if minutes < 1 else f"{minutes:.1f} min" if hours < 1 else f"{hours:.1f} h"
