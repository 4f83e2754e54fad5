"""Makes one folder that runs the steps of run.py without network where torch, peft, accelerate and pyarrow are.

    python scripts/gpu/bundle.py OUT [--python 3.12] [--cuda 130] [--base FOLDER --data FOLDER]

Then copy OUT there and run `bash OUT/run.sh` with the words of run.py. --python: of that machine. --cuda: the version
of bitsandbytes' kernels to keep, as torch names it (2.11+cu130). What is not committed is not in it. It has at most
60 MiB. --base and --data: for the step `evidence`, also a real base and its data, in parts of 48 MiB, OUT/more-*, which
may travel one by one: run.sh unpacks them once all are there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MOST, PART = 60 * 2**20, 48 * 2**20  # bytes
DATA = ("flan/dataset1", "flan/t0_common_gen", "rolebench/eng")  # what scripts/evidence/draw.sh reads
PRESENT = ("torch", "peft", "accelerate", "pyarrow")  # on the machine
UNUSED = ("datasets", "numpy", "hf-xet")  # read tables and data of the Hub, or come with torch
MORE = ("pytest", "hypothesis", "fastapi", "uvicorn")  # what tests/conftest.py and `llm-fed serve` import
PLATFORMS = [f"manylinux{glibc}_x86_64" for glibc in ("_2_28", "_2_27", "_2_24", "_2_17", "2014")]
KERNELS = re.compile(r"libbitsandbytes_(\w+?)\.so")
NEEDLESS = re.compile(r"(^|/)tests?/|/baseline_images/|\.(c|pyx|pxd)$|^fontTools/.*\.so$|/fonts/(afm|ttf/STIX|ttf/cm)")
RUN = """\
#!/usr/bin/env bash
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export HF_HUB_OFFLINE=1 PYTHONPATH="$here/site" PYTHON="${PYTHON:-python3}"
[ -e "$here/code" ] || "$PYTHON" -m tarfile -e "$here/bundle.tar.xz" "$here"
shopt -s nullglob
parts=("$here"/more-*) # more-NUMBER-COUNT
if [ ! -e "$here/more" ] && [ "${#parts[@]}" -gt 0 ] && [ "${#parts[@]}" -eq "${parts[0]##*-}" ]; then
  cat "${parts[@]}" > "$here/parts.tar.xz"
  "$PYTHON" -m tarfile -e "$here/parts.tar.xz" "$here/unpacked"
  mv "$here/unpacked" "$here/more"
fi
for base in "$here"/more/base/*; do
  export BASE="${BASE:-$base}" LLM_FED_DATA="${LLM_FED_DATA:-$here/more/data}"
done
exec "$PYTHON" "$here/code/scripts/gpu/run.py" "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}")
    parser.add_argument("--cuda", default="")
    parser.add_argument("--base", type=Path, help="a folder of a real base")
    parser.add_argument("--data", type=Path, help=f"a folder with {', '.join(DATA)}")
    args = parser.parse_args()
    if (args.base is None) != (args.data is None):
        parser.error("--base and --data go together")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        code(place)
        download(place / "wheels", args.python)
        for wheel in (place / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                names = [name for name in packed.namelist() if is_needed(name, {"cpu", f"cuda{args.cuda}"})]
                packed.extractall(place / "site", names)
        with tarfile.open(args.out / "bundle.tar.xz", "w:xz") as packed:
            for part in ("code", "site", "commit"):
                packed.add(place / part, part)
    (args.out / "run.sh").write_text(RUN)
    size = (args.out / "bundle.tar.xz").stat().st_size
    print(f"{args.out}: {size / 2**20:.0f} MiB")
    if size > MOST:
        sys.exit(f"bundle.py: that is more than {MOST / 2**20:.0f} MiB")
    if args.base:
        in_parts(args.out, args.base, args.data)


def in_parts(out: Path, base: Path, data: Path) -> None:
    """OUT/more-NUMBER-COUNT: one after another a compressed tar of `base` and `data`."""
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:xz") as packed:
            packed.add(base, f"base/{base.resolve().name}")  # which names the files of scores
            for name in DATA:
                packed.add(data / name, f"data/{name}")
        count = -(-whole.tell() // PART)
        whole.seek(0)
        for old in out.glob("more-*"):
            old.unlink()
        for number in range(count):
            (out / f"more-{number:02}-{count}").write_bytes(whole.read(PART))
    print(f"{base}, {data}: {count} parts of at most {PART / 2**20:.0f} MiB")


def code(place: Path) -> None:
    """The last commit: its scripts and tests, and llm_fed as an installed package lies."""
    (place / "commit").write_bytes(git("rev-parse", "--short=12", "HEAD"))
    parts = {name: f"site/llm_fed/{name}" for name in ("tasks", "eval", "scripts/runs", "scripts/launch")}
    parts |= {name: f"code/{name}" for name in ("tests", "scripts", "pyproject.toml")}
    for name, goal in {"llm_fed": "site/llm_fed", **parts}.items():
        folder = place / goal.removesuffix(name)
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-x", "-C", folder], input=git("archive", "HEAD", name), check=True)
    info = place / f"site/llm_fed-{distribution('llm-fed').version}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-fed\nVersion: {info.name[8:-10]}\n")


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


def carried() -> list[str]:
    """What this environment has for llm_fed, its tests and its server, without what comes with PRESENT; of the extra
    `gpu` what pyproject.toml asks for, as this environment need not have it."""
    newer = closure(["transformers"], without=UNUSED) - {"typer"}  # some versions of huggingface_hub do without
    needed = closure(["llm-fed", *MORE], without=UNUSED) - (closure(PRESENT, without=["typer"]) - newer) - {"llm-fed"}
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


def is_needed(name: str, kernels: set[str]) -> bool:
    """Whether any step needs a file of a wheel; of bitsandbytes' kernels these."""
    kernel = KERNELS.search(name)
    return not NEEDLESS.search(name) and (kernel is None or kernel[1] in kernels)


if __name__ == "__main__":
    main()
