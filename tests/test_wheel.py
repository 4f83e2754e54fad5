"""The wheel holds every module and asset, built of what the Dockerfiles copy, and works outside the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PLACES = {  # in the checkout, in the wheel
    "llm_fed": "llm_fed",
    "tasks": "llm_fed/tasks",
    "eval": "llm_fed/eval",
    "scripts/runs": "llm_fed/scripts/runs",
    "scripts/launch": "llm_fed/scripts/launch",
}
# The checkout's own import hook would answer for what the wheel lacks.
ALONE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
from llm_fed import cli
try:
    cli.main(sys.argv[1:])
finally:
    files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "llm_fed"]
    print(*filter(None, files), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since setuptools writes beside what it builds. It holds what the Dockerfiles copy, which all
    copy the same (see scripts/test_slurm.py), so their wheel is whole where this one is."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    dockerfile = next(iter(REPOSITORY.glob("docker/*.Dockerfile"))).read_text()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for name in line.split():
            if (REPOSITORY / name).is_dir():
                shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
            else:
                shutil.copy(REPOSITORY / name, source / name)
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    built = subprocess.run([*words, "--wheel-dir", source, source], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (found,) = source.glob("*.whl")
    return found


def test_it_holds_all_that_the_checkout_holds(wheel):
    wanted = set()
    for folder, place in PLACES.items():
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted.add(f"{place}/{path.relative_to(REPOSITORY / folder).as_posix()}")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("llm_fed/")}
    assert held == wanted


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory) -> Path:
    """Where it is installed."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_run_files_are_found_by_name_outside_the_checkout(place, tmp_path):
    code = ALONE.partition("from llm_fed")[0] + (
        "import json\nfrom llm_fed.settings import configfile, shipped\n"
        "print(json.dumps([shipped.rows(), configfile.load('flan.yaml', ['rounds=3']).rounds]))"
    )
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows, rounds = json.loads(ended.stdout)
    wanted = {path.name for kind in ("runs", "launch") for path in (REPOSITORY / "scripts" / kind).glob("*.yaml")}
    assert {row["name"] for row in rows} == wanted and rounds == 3
    assert all(Path(row["file"]).is_relative_to(place) for row in rows)


@pytest.mark.slow
def test_the_first_round_of_the_quickstart_outside_the_checkout(place, tmp_path):
    assets = place / "llm_fed" / "assets"
    words = ["run", assets / "quickstart.yaml", f"base.name={assets / 'tiny-base'}", "rounds=1", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, words)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "summary.json").is_file() and (tmp_path / "run" / "report.html").is_file()
    files = [line for line in ended.stdout.splitlines() if line.endswith(".py")]
    assert len(files) > 50 and all(Path(file).is_relative_to(place) for file in files), files
