"""Prints the packages that a bundle carries, one a line as NAME==VERSION: what this environment has for llm_fed and its
tests, without what comes with torch, transformers, peft and accelerate, and without what no step imports. Of the extra
`gpu` it prints what pyproject.toml asks for, as this environment need not have it.

    python scripts/gpu/carried.py [--newer]

--newer: with transformers and what it requires, for a machine whose own is too old.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

PRESENT = ("torch", "transformers", "peft", "accelerate")
UNUSED = ("datasets", "pyarrow")  # read tables and data sets of the Hub; 50 MB of wheels
VARIES = ("typer",)  # some versions of huggingface_hub do with less of it
TESTS = ("pytest", "hypothesis")  # what tests/conftest.py imports
NEWER, WITHOUT = "transformers", ("numpy", "hf-xet")  # the first is torch's, the second loads from the Hub


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """These packages and all that they require here, but for some with what only those require."""
    found: set[str] = set()
    left = [normal(name) for name in names]
    while left:
        name = left.pop()
        if name in found or name in without:
            continue
        try:
            requires = distribution(name).requires or ()
        except PackageNotFoundError:  # for another system or Python
            continue
        found.add(name)
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(normal(requirement.name))
    return found


def carried(newer: bool = False) -> list[str]:
    """As requirements.

    Args:
        newer: with transformers, and what it requires, in the place of what the machine has.
    """
    present = closure(PRESENT, without=VARIES) | {"llm-fed"}
    if newer:
        present -= closure([NEWER], without=(*VARIES, *WITHOUT))
    needed = closure(["llm-fed", *TESTS, *([NEWER] if newer else [])], without=(*UNUSED, *WITHOUT)) - present
    pinned = sorted(f"{name}=={distribution(name).version}" for name in needed)
    return [*pinned, *kernels()]


def kernels() -> list[str]:
    """What the extra `gpu` asks for. What these require, torch brings on a GPU."""
    asked = map(Requirement, distribution("llm-fed").requires or ())
    return [f"{each.name}{each.specifier}" for each in asked if str(each.marker) == 'extra == "gpu"']


if __name__ == "__main__":
    print("\n".join(carried(newer="--newer" in sys.argv[1:])))
