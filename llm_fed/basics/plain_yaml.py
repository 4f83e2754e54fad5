"""YAML of plain values, by libyaml where PyYAML was built with it: the same values in a fifth of the time. It refuses
what is nested deeper than it can read, as any other file that is no YAML."""

from __future__ import annotations

from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load(text: str) -> Any:
    """The values of a document.

    Raises:
        yaml.YAMLError: it is none, or has tags.
        RecursionError: it is nested too deeply, where there is no libyaml.
    """
    return yaml.load(text, Loader=_Loader)


def dump(values: Any) -> str:
    """A document of dicts, lists, texts and numbers, in their order."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False))
