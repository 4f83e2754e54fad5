"""Prints the packages that a bundle carries, one a line as NAME==VERSION: what this environment has for llm_fed and its
tests, without what comes with torch, transformers, peft and accelerate, and without what no step imports.

    python scripts/gpu/carried.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

PRESENT = ("torch", "transformers", "peft", "accelerate")
UNUSED = ("datasets", "pyarrow")  # read tables and data sets of the Hub; 50 MB of wheels
VARIES = ("typer",)  # some versions of huggingface_hub do with less of it
TESTS = ("pytest",)


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


def carried() -> list[str]:
    present = closure(PRESENT, without=VARIES) | {"llm-fed"}
    needed = closure(["llm-fed", *TESTS], without=UNUSED) - present
    return sorted(f"{name}=={distribution(name).version}" for name in needed)


if __name__ == "__main__":
    print("\n".join(carried()))
