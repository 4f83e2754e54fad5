"""Makes one folder that runs the steps of run.py on a machine that has torch, peft and accelerate, and no network.

    python scripts/gpu/bundle.py OUT [--python 3.12] [--cuda 130] [--code-only]

Then copy OUT there and run `bash OUT/run.sh` with the words of run.py. A real base is not part of it. --python: of that
machine. --cuda: the version of bitsandbytes' kernels to keep, as torch names it (2.11+cu130). --code-only: no packages,
for a machine that has llm_fed's. What is not committed is not in it either. It has at most 60 MiB.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MOST = 60 * 2**20  # bytes
PRESENT = ("torch", "peft", "accelerate")  # on the machine
UNUSED = ("datasets", "pyarrow", "numpy", "hf-xet")  # read tables and data of the Hub, or come with torch
TESTS = ("pytest", "hypothesis")  # what tests/conftest.py imports
PLATFORMS = [f"manylinux{glibc}_x86_64" for glibc in ("_2_28", "_2_27", "_2_24", "_2_17", "2014")]
KERNELS = re.compile(r"libbitsandbytes_(\w+?)\.so")
NEEDLESS = re.compile(
    r"(^|/)tests?/|/baseline_images/|\.(c|pyx|pxd)$|^fontTools/.*\.so$|/fonts/(afm|pdfcorefonts|ttf/STIX|ttf/cm)"
)
RUN = """\
#!/usr/bin/env bash
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ ! -e "$here/site" ]; then
  mkdir "$here/site"
  for wheel in "$here"/wheels/*.whl; do "${PYTHON:-python3}" -m zipfile -e "$wheel" "$here/site"; done
fi
export HF_HUB_OFFLINE=1 PYTHONPATH="$here/site:$here/package"
exec "${PYTHON:-python3}" "$here/code/scripts/gpu/run.py" "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}")
    parser.add_argument("--cuda", default="")
    parser.add_argument("--code-only", action="store_true")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty; remove it, or name another folder")
    (wheels := args.out / "wheels").mkdir(parents=True)
    code(args.out)
    if not args.code_only:
        download(wheels, args.python)
        for wheel in wheels.glob("*.whl"):
            lighten(wheel, {"cpu", f"cuda{args.cuda}"})
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {size / 2**20:.0f} MiB")
    if size > MOST:
        sys.exit(f"bundle.py: that is more than {MOST / 2**20:.0f} MiB")


def code(out: Path) -> None:
    """The last commit: its scripts and tests, and llm_fed as an installed package lies."""
    (out / "commit").write_bytes(git("rev-parse", "--short=12", "HEAD"))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=git("archive", "HEAD"), check=True)
        source = Path(folder)
        for part in ("tests", "scripts/gpu", "scripts/bench", "scripts/default"):
            shutil.copytree(source / part, out / "code" / part)
        shutil.copy(source / "pyproject.toml", out / "code")
        shutil.copytree(source / "llm_fed", out / "package/llm_fed", dirs_exist_ok=True)
        for part in ("tasks", "eval", "scripts/runs", "scripts/launch"):
            shutil.copytree(source / part, out / "package/llm_fed" / part, dirs_exist_ok=True)
    info = out / f"package/llm_fed-{distribution('llm-fed').version}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-fed\nVersion: {info.name[8:-10]}\n")
    (out / "run.sh").write_text(RUN)


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


def download(wheels: Path, python: str) -> None:
    """The packages that the machine lacks; one that is published as sources alone is built."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [word for each in [*PLATFORMS, "any"] for word in ("--platform", each)]
    where = ["--python-version", python, "--implementation", "cp", *platforms, "--dest", str(wheels)]
    subprocess.run([*pip, "download", "--quiet", "--no-deps", *where, *carried()], check=True)
    for source in [*wheels.glob("*.tar.gz"), *wheels.glob("*.zip")]:
        subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(source)], check=True)
        source.unlink()


def carried() -> list[str]:
    """What this environment has for llm_fed and its tests, without what comes with PRESENT; of the extra `gpu` what
    pyproject.toml asks for, as this environment need not have it."""
    newer = closure(["transformers"], without=UNUSED) - {"typer"}  # some versions of huggingface_hub do without
    needed = closure(["llm-fed", *TESTS], without=UNUSED) - (closure(PRESENT, without=["typer"]) - newer) - {"llm-fed"}
    asked = map(Requirement, distribution("llm-fed").requires or ())
    kernels = [f"{each.name}{each.specifier}" for each in asked if str(each.marker) == 'extra == "gpu"']
    return [*sorted(f"{name}=={distribution(name).version}" for name in needed), *kernels]


def closure(names: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """These packages and all that they require here, but for some with what only those require."""
    found, left = set[str](), [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name in found or name in without:
            continue
        try:
            requires = map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:  # for another system or Python
            continue
        found.add(name)
        left += [canonicalize_name(r.name) for r in requires if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def lighten(wheel: Path, kernels: set[str]) -> None:
    """Without what no step needs. Its RECORD still names it: such a wheel can be unpacked, not installed."""
    light = wheel.with_suffix(".light")
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(light, "w", zipfile.ZIP_DEFLATED) as kept:
        for item in full.infolist():
            kernel = KERNELS.search(item.filename)
            if not NEEDLESS.search(item.filename) and (kernel is None or kernel[1] in kernels):
                kept.writestr(item, full.read(item), zipfile.ZIP_DEFLATED)
    light.replace(wheel)


if __name__ == "__main__":
    main()
