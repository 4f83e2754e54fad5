"""The packages of a bundle: those that it carries, wheels without what no step needs, and what a machine lacks.

    python scripts/gpu/packages.py carried [--newer]          # one a line, as NAME==VERSION
    python scripts/gpu/packages.py lighten WHEELS [--cuda 130]
    python scripts/gpu/packages.py present                    # ends with 2 where no step would run

--newer: with transformers and what it requires, for a machine whose own is too old. --cuda: keep these kernels.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
PRESENT = ("torch", "transformers", "peft", "accelerate")  # on the machine
UNUSED = ("datasets", "pyarrow")  # read tables and data sets of the Hub; 50 MB of wheels
VARIES = ("typer",)  # some versions of huggingface_hub do with less of it
TESTS = ("pytest", "hypothesis")  # what tests/conftest.py imports
NEWER, WITHOUT = "transformers", ("numpy", "hf-xet")  # the first is torch's, the second loads from the Hub
KERNELS = re.compile(r"libbitsandbytes_(\w+?)\.so")
NEEDLESS = re.compile(
    r"(^|/)tests?/|/baseline_images/|\.(c|pyx|pxd)$|^fontTools/.*\.so$|/fonts/(afm|pdfcorefonts|ttf/STIX|ttf/cm)"
)
LARGE = 500_000  # bytes: smaller wheels stay as they are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["carried", "lighten", "present"])
    parser.add_argument("wheels", type=Path, nargs="?")
    parser.add_argument("--newer", action="store_true")
    parser.add_argument("--cuda", default="")
    args = parser.parse_args()
    if args.what == "carried":
        print("\n".join(carried(newer=args.newer)))
    elif args.what == "present":
        sys.exit(present())
    else:
        for wheel in sorted(args.wheels.glob("*.whl")):
            if wheel.stat().st_size > LARGE:
                lighten(wheel, {"cpu", f"cuda{args.cuda}"})


def carried(newer: bool = False) -> list[str]:
    """What this environment has for llm_fed and its tests, without what comes with torch, transformers, peft and
    accelerate; of the extra `gpu` what pyproject.toml asks for, as this environment need not have it."""
    from packaging.requirements import Requirement

    present = closure(PRESENT, without=VARIES) | {"llm-fed"}
    if newer:
        present -= closure([NEWER], without=(*VARIES, *WITHOUT))
    needed = closure(["llm-fed", *TESTS, *([NEWER] if newer else [])], without=(*UNUSED, *WITHOUT)) - present
    asked = map(Requirement, distribution("llm-fed").requires or ())
    kernels = [f"{each.name}{each.specifier}" for each in asked if str(each.marker) == 'extra == "gpu"']
    return [*sorted(f"{name}=={distribution(name).version}" for name in needed), *kernels]


def closure(names: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """These packages and all that they require here, but for some with what only those require."""
    from packaging.requirements import Requirement

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


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lighten(wheel: Path, kernels: set[str]) -> None:
    """Its RECORD still names what was left out: such a wheel can be unpacked, and an installer may refuse it."""
    light = wheel.with_suffix(".light")
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(light, "w", zipfile.ZIP_DEFLATED) as kept:
        for item in full.infolist():
            kernel = KERNELS.search(item.filename)
            if not NEEDLESS.search(item.filename) and (kernel is None or kernel[1] in kernels):
                kept.writestr(item, full.read(item), zipfile.ZIP_DEFLATED)
    light.replace(wheel)


def present() -> int:
    """2 where a package is missing that no bundle carries; names those in another version than is asked for."""
    if lacking := [name for name in PRESENT if installed(name) is None]:
        print(f"run.sh: {sys.executable} has no {', '.join(lacking)}, which no bundle carries", file=sys.stderr)
        return 2
    from packaging.requirements import Requirement  # transformers and accelerate bring it

    for asked in map(Requirement, tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]):
        has = installed(asked.name)
        if has is not None and not asked.specifier.contains(has, prereleases=True):
            wanted = f"{asked.name}{asked.specifier}"
            print(f"{asked.name} {has} is not what pyproject.toml asks for ({wanted}); steps may fail")
    return 0


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
