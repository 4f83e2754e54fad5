#!/usr/bin/env bash
# Builds the sdist, and from it the wheel, into dist/. Then tries the wheel with every Python from 3.11 to 3.13: a fresh
# environment outside the clone, the installation, and three rounds of the quickstart's configuration. At its end it
# names what it did not try, each with the command that does: Pythons, the lowest dependencies, a newer torch.
#
#   bash scripts/release.sh                    # those that are on the path as python3.11, python3.12, ...
#   bash scripts/release.sh /opt/python3.12/bin/python3
#
# PIPFLAGS goes to `pip install`, as in the Makefile.
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

pythons=("$@")
tried=" "
if [ ${#pythons[@]} -eq 0 ]; then
  for version in 3.11 3.12 3.13; do
    if "python$version" -c "import venv" 2>/dev/null; then pythons+=("python$version"); fi
  done
fi
if [ ${#pythons[@]} -eq 0 ]; then
  echo "no Python from 3.11 to 3.13 is on the path; give one, as in bash scripts/release.sh /usr/bin/python3" >&2
  exit 2
fi

rm -rf dist
"${pythons[0]}" -m venv "$work/build"
"$work/build/bin/pip" install --quiet ${PIPFLAGS:-} build
"$work/build/bin/python" -m build --outdir dist .

for python in "${pythons[@]}"; do
  place="$work/$(basename "$python")"
  "$python" -m venv "$place/venv"
  "$place/venv/bin/pip" install --quiet ${PIPFLAGS:-} "$root"/dist/*.whl
  cd "$place"
  assets="$(venv/bin/python -c 'import llm_fed; print(llm_fed.__path__[0])')/assets"
  case "$assets" in "$root"/*) echo "$python imports the clone, not the wheel" >&2; exit 1 ;; esac
  venv/bin/llm-fed runs >/dev/null
  venv/bin/llm-fed run "$assets/quickstart.yaml" base.name="$assets/tiny-base" rounds=3 --out run
  venv/bin/llm-fed export run out
  tried+="$(venv/bin/python -c 'import sys; print("{}.{}".format(*sys.version_info))') "
  echo "$(venv/bin/llm-fed --version) works with $(venv/bin/python --version)"
  cd "$root"
  rm -rf "$place"
done
ls dist
for version in 3.11 3.12 3.13; do
  case "$tried" in *" $version "*) ;; *) echo "not tried: Python $version; bash scripts/release.sh /path/to/python$version" ;; esac
done
echo "not tried: the lowest dependencies; TORCH=2.11.0 bash scripts/lowest.sh"
# Beyond the bound in pyproject.toml, so pip says that llm_fed does not want it, and installs it all the same.
echo "not tried: torch 2.14; python3 -m venv V && V/bin/pip install -e '.[dev]' &&" \
  "V/bin/pip install 'torch==2.14.*' && V/bin/python -m pytest -m 'not slow and not gpu'"
