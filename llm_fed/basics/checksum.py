"""Checksums that small files carry within themselves, so that whoever reads one finds damage to it.

What has no checksum is taken as it is: older versions wrote none, and other programs write none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

KEY = "checksum"
_COMMENT = re.compile(r"^# sha256: (.*)\n\Z", re.MULTILINE)


class ChecksumError(ValueError):
    """A file is not what was written."""


def of(values: Mapping[str, Any]) -> str:
    """The SHA-256 of JSON values, whatever the order of their keys and the spaces between them; KEY is left out."""
    own = json.loads(json.dumps({key: value for key, value in values.items() if key != KEY}))
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def added(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, KEY: of(values)}


def checked(values: Any) -> dict[str, Any]:
    """What was given to `added`, or values without a checksum as they are; ChecksumError where they are others."""
    if not isinstance(values, dict):
        raise ChecksumError("it is not a JSON object")
    if KEY in values and values[KEY] != of(values):
        raise ChecksumError("it does not match its checksum")
    return {key: value for key, value in values.items() if key != KEY}


def commented(text: str) -> str:
    """A text of whole lines, with a comment of its checksum as the last one."""
    return f"{text}# sha256: {hashlib.sha256(text.encode()).hexdigest()}\n"


def uncommented(text: str) -> str:
    """What was given to `commented`, or a text without such a last line as it is; ChecksumError where it is another."""
    comment = _COMMENT.search(text)
    own = text[: comment.start()] if comment else text
    if comment and comment[1] != hashlib.sha256(own.encode()).hexdigest():
        raise ChecksumError(
            "it does not match the checksum in its last line (if you changed it on purpose, delete that line)"
        )
    return own
