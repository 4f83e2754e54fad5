"""Names of clients: equal where they look equal, and fit to name a folder; and numbers as a run's files hold them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote


def composed(name: str) -> str:
    """The name in the form in which letters and their accents are one (NFC): macOS writes names of files in another."""
    return unicodedata.normalize("NFC", name)


def folder_name(name: str) -> str:
    """The composed name with whatever no folder can have in its name written as in an address: `x/y` as `x%2Fy`."""
    name = composed(name)
    if name in (".", ".."):
        return name.replace(".", "%2E")
    if name.isprintable() and not {*name} & {*"/\\"}:
        return name
    return "".join(char if char.isprintable() and char not in "/\\%" else quote(_bytes(char), "") for char in name)


def same_name(name: str, valid: Collection[str]) -> str | None:
    """The valid name that is meant by `name`, which may be written in another form; None where there is none."""
    if name in valid:
        return name
    forms = {composed(each): each for each in valid if isinstance(each, str)}
    return forms.get(composed(name), forms.get(folder_name(name))) if isinstance(name, str) else None


def _bytes(char: str) -> bytes:
    """Also of half a character: of a byte in the name of a file that is no UTF-8, that byte."""
    return char.encode(errors="surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass")


def rounded(value: Any) -> Any:
    """Every float, in dictionaries and lists too, to six significant digits: enough to read, and alike where only the
    last bit differs. One that JSON does not have is None."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [rounded(item) for item in value]
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
