#!/usr/bin/env bash
# Runs the tests with the lowest version of each dependency that pyproject.toml allows, in an environment of its own.
# torch is the newest, unless TORCH names another: a package index may have old ones as CUDA builds alone, of gigabytes.
#
#   bash scripts/lowest.sh                     # needs Python 3.11 or newer, for tomllib; PIPFLAGS as in the Makefile
#   bash scripts/lowest.sh tests/engine -x     # a part of the tests
#   TORCH=2.11.0 bash scripts/lowest.sh         # the lowest torch, too
set -euo pipefail
cd "$(dirname "$0")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
python3 - > "$work/lowest.txt" <<'END'
import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
for line in project["dependencies"] + extras["privacy"] + extras["excel"] + extras["gguf"]:
    name, lowest = re.fullmatch(r"([\w-]+)>=([\d.]+).*", line).groups()
    if name != "torch":
        print(f"{name}=={lowest}")
END
if [ -n "${TORCH:-}" ]; then echo "torch==$TORCH" >> "$work/lowest.txt"; fi
# Not the extra `dev`: Flower needs newer versions of its own dependencies than this project does. So the tests of the
# site, of Flower's keys and of serving are left out, and those that need Flower skip themselves. Tests build wheels with
# setuptools.
"$work/venv/bin/pip" install --quiet ${PIPFLAGS:-} --constraint "$work/lowest.txt" --editable '.[privacy,excel,gguf]' \
  'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6.100' 'setuptools>=77'
"$work/venv/bin/pip" list --format=freeze
export VENV="$work/venv" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$VENV/bin/python" -m pytest -n "${WORKERS:-2}" --dist worksteal -m "not slow and not gpu" \
  --ignore tests/scripts/test_site.py --ignore tests/scripts/test_flower_keys.py --ignore tests/commands/test_serve.py "$@"
