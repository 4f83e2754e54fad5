"""Tries whether tests notice faults: plants each of mutants.yaml in a copy of this checkout and runs its tests there.

    python scripts/mutants/plant.py                          # all, some twenty minutes on two cores (`make mutants`)
    python scripts/mutants/plant.py --only "IFCA takes" ...  # those whose name begins so

A line of runs/mutants.jsonl per fault says which test noticed it first; the same command goes on with what is missing,
and `--table` writes what is there as a table. First all tests run without a fault, since a test that always fails
notices nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("mutants.yaml")


def faults(path: Path = FAULTS) -> list[dict[str, Any]]:
    """The faults, each checked against the file in which it is planted."""
    given: list[dict[str, Any]] = yaml.safe_load(path.read_text())
    for fault in given:
        if (times := (ROOT / fault["file"]).read_text().count(fault["old"])) != 1:
            raise SystemExit(f"{path}: {fault['name']}: `old` stands {times} times in {fault['file']}; it must be once")
    return given


def copy_into(folder: Path) -> None:
    """What git tracks, as it is now, with `tasks` and `eval` where an installed llm_fed has them."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name in ("tasks", "eval"):
        (folder / "llm_fed" / name).symlink_to(f"../{name}")


def tried(folder: Path, tests: list[str], seconds: int) -> tuple[bool, str]:
    """Whether tests of a copy pass in so many seconds, and which is the first that does not."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests]
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False, f"more than {seconds} s"
    first = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode == 0, first[1] if first else done.stdout[-200:]


def table(results: list[dict[str, Any]]) -> str:
    """Faults, their files, and the tests that noticed them first, in Markdown."""
    rows = []
    for line in results:
        noticed = f"`{line['noticed']}`" if line["noticed"] else "none"
        rows.append(f"| {line['name']} | `{line['file']}` | {noticed} | {line['seconds']} |")
    return "\n".join(["| fault | file | first test that fails | seconds |", "|---|---|---|---:|", *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], metavar="NAME", help="beginnings of names")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/mutants.jsonl")
    parser.add_argument(
        "--seconds", type=int, default=900,
        help="that the tests of one fault may take: one with which they hang is noticed, too; more on a busy machine",
    )  # fmt: skip
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="where to write the results as a table")
    given = parser.parse_args()
    chosen = [fault for fault in faults() if fault["name"].startswith(tuple(given.only))]
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(line["name"], line["old"], line["new"]): line for line in lines}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        copy_into(folder)
        left = [fault for fault in chosen if (fault["name"], fault["old"], fault["new"]) not in known]
        if left:
            passed, first = tried(
                folder, sorted({test for fault in left for test in fault["tests"]}), 9 * given.seconds
            )
            if not passed:
                raise SystemExit(f"without any fault this test fails: {first}")
        for fault in left:
            file, began = folder / fault["file"], time.monotonic()
            whole = file.read_text()
            file.write_text(whole.replace(fault["old"], fault["new"]))
            passed, first = tried(folder, fault["tests"], given.seconds)
            file.write_text(whole)
            line = {key: fault[key] for key in ("name", "file", "old", "new")}
            line |= {"noticed": "" if passed else first, "seconds": round(time.monotonic() - began)}
            known[fault["name"], fault["old"], fault["new"]] = line
            with given.out.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(f"{fault['name']}: {line['noticed'] or 'NOT NOTICED'} ({line['seconds']} s)", flush=True)
    results = [known[fault["name"], fault["old"], fault["new"]] for fault in chosen]
    if given.table:
        given.table.write_text(table(results))
    unnoticed = [line["name"] for line in results if not line["noticed"]]
    print(f"{len(results) - len(unnoticed)} of {len(results)} faults were noticed")
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main()
