"""Says which packages of this Python are missing or older than pyproject.toml asks for, before any step of `run.sh`.

    python scripts/gpu/present.py

It ends with 2 where torch, transformers, peft or accelerate is missing, as no step would run.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
NEEDED = ("torch", "transformers", "peft", "accelerate")


def main() -> None:
    lacking = [name for name in NEEDED if found(name) is None]
    if lacking:
        print(f"run.sh: {sys.executable} has no {', '.join(lacking)}, which no bundle carries", file=sys.stderr)
        sys.exit(2)
    for name, has, wanted in others():
        print(f"{name} {has} is not what pyproject.toml asks for ({name}{wanted}); steps may fail, and figures name it")


def others() -> Iterator[tuple[str, str, str]]:
    """Packages that are here in another version than is asked for: name, version, and what is asked for."""
    from packaging.requirements import Requirement  # transformers and accelerate bring it

    for asked in map(Requirement, tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]):
        has = found(asked.name)
        if has is not None and not asked.specifier.contains(has, prereleases=True):
            yield asked.name, has, str(asked.specifier)


def found(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
