"""Leaves out of a folder of wheels what no step needs and would make a bundle large: bitsandbytes' kernels for other
versions of CUDA, tests and sources in C of packages, what only makes fontTools quicker, and fonts for formulas.

    python scripts/gpu/lighten.py WHEELS [--cuda 130]
"""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path

KERNELS = re.compile(r"libbitsandbytes_(\w+?)\.so")
UNUSED = re.compile(
    r"(^|/)tests?/|/baseline_images/|\.(c|pyx|pxd)$|^fontTools/.*\.so$|/fonts/(afm|pdfcorefonts|ttf/STIX|ttf/cm)"
)
LARGE = 500_000  # bytes: smaller wheels stay as they are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--cuda", default="", help="keep the kernels of this version, e.g. 130")
    args = parser.parse_args()
    for wheel in sorted(args.wheels.glob("*.whl")):
        if wheel.stat().st_size > LARGE:
            lighten(wheel, {"cpu", f"cuda{args.cuda}"})


def lighten(wheel: Path, kernels: set[str]) -> None:
    """Its RECORD still names what was left out: such a wheel can be unpacked, and an installer may refuse it."""
    light = wheel.with_suffix(".light")
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(light, "w", zipfile.ZIP_DEFLATED) as kept:
        for item in full.infolist():
            kernel = KERNELS.search(item.filename)
            if not UNUSED.search(item.filename) and (kernel is None or kernel[1] in kernels):
                kept.writestr(item, full.read(item), zipfile.ZIP_DEFLATED)
    light.replace(wheel)


if __name__ == "__main__":
    main()
