#!/usr/bin/env bash
# Makes one folder that runs the steps of run.sh on a machine that has torch, transformers, peft and accelerate, and no
# network:
#
#   bash scripts/gpu/bundle.sh OUT [--python 3.12] [--cuda 130] [--newer] [--code-only]
#
# --python: of that machine (default: the Python that makes the bundle; wheels differ). --cuda: the version of
# bitsandbytes' kernels to keep, as torch names it: 130 of torch 2.11+cu130 (default: all are left out but the CPU's).
# --newer: also transformers and what it requires, for a machine whose own is older than pyproject.toml asks for.
# --code-only: no packages, for a machine that has llm_fed's. Then copy OUT there and run `bash OUT/run.sh`. A real base
# is not part of it: copy its folder to OUT/model. What is not committed is not in it either.
# Variable: MOST, the MiB that it may have (60).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-.venv/bin/python}"
most="${MOST:-60}" # MiB
out="" version="" cuda="" newer="" packages=yes
while [ $# -gt 0 ]; do
  case "$1" in
    --python) version="${2:?--python takes a version such as 3.12}"; shift ;;
    --cuda) cuda="${2:?--cuda takes a version such as 130}"; shift ;;
    --newer) newer=--newer ;;
    --code-only) packages="" ;;
    -*) echo "bundle.sh: there is no option $1" >&2; exit 2 ;;
    *) if [ -n "$out" ]; then echo "bundle.sh: two folders, $out and $1" >&2; exit 2; fi; out="$1" ;;
  esac
  shift
done
if [ -z "$out" ]; then echo "bundle.sh: name the folder to make, as in: bash scripts/gpu/bundle.sh OUT" >&2; exit 2; fi
if [ -e "$out" ] && [ -n "$(ls -A "$out")" ]; then
  echo "bundle.sh: $out exists and is not empty; remove it, or name another folder" >&2
  exit 2
fi
if ! git rev-parse HEAD > /dev/null 2>&1; then echo "bundle.sh: this is no clone, so no commit can be packed" >&2; exit 2; fi

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out/wheels" "$out/code" "$scratch/source"
out="$(cd "$out" && pwd)"
git archive HEAD | tar -x -C "$scratch/source"
git rev-parse --short=12 HEAD > "$out/commit"
mkdir -p "$out/code/scripts" "$out/package/llm_fed"
cp -r "$scratch/source/pyproject.toml" "$scratch/source/tests" "$out/code/"
cp -r "$scratch/source/scripts/gpu" "$scratch/source/scripts/bench" "$scratch/source/scripts/default" "$out/code/scripts/"
# llm_fed as an installed package lies, without a build, for which an environment may be too old.
cp -r "$scratch/source/llm_fed/." "$out/package/llm_fed/"
for part in tasks eval scripts/runs scripts/launch; do
  mkdir -p "$out/package/llm_fed/$part"
  cp -r "$scratch/source/$part/." "$out/package/llm_fed/$part/"
done
number="$(sed -n 's/^version = "\(.*\)"/\1/p' "$scratch/source/pyproject.toml")"
mkdir -p "$out/package/llm_fed-$number.dist-info"
printf 'Metadata-Version: 2.1\nName: llm-fed\nVersion: %s\n' "$number" > "$out/package/llm_fed-$number.dist-info/METADATA"
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

if [ -n "$packages" ]; then
  "$python" scripts/gpu/packages.py carried $newer > "$scratch/carried.txt"
  of="${version:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}"
  platforms="--platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any"
  mkdir "$scratch/built"
  # shellcheck disable=SC2086
  pip download --quiet --no-deps --python-version "$of" --implementation cp $platforms --dest "$out/wheels" \
    -r "$scratch/carried.txt" 2> "$scratch/why" ||
    { cat "$scratch/why" >&2; echo "bundle.sh: not all packages are there for Python $of" >&2; exit 1; }
  for source in "$out"/wheels/*.tar.gz "$out"/wheels/*.zip; do # published as sources only
    if [ ! -e "$source" ]; then continue; fi
    pip wheel --quiet --no-deps --wheel-dir "$scratch/built" "$source" 2> "$scratch/why" ||
      { cat "$scratch/why" >&2; echo "bundle.sh: no wheel of $(basename "$source")" >&2; exit 1; }
    rm "$source"
  done
  for wheel in "$scratch"/built/*.whl; do
    case "$wheel" in
      *'/*.whl') ;;
      *-none-any.whl) mv "$wheel" "$out/wheels/" ;; # which any Python can use
      *) echo "bundle.sh: no wheel for Python $of, and one of this Python is no use: $(basename "$wheel")" >&2; exit 1 ;;
    esac
  done
  "$python" scripts/gpu/packages.py lighten "$out/wheels" ${cuda:+--cuda "$cuda"}
fi

cat > "$out/run.sh" << 'RUN'
#!/usr/bin/env bash
# bash run.sh [--tiny] [STEP ...]: see code/scripts/gpu/run.sh
set -euo pipefail
export BUNDLE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export OUT="${OUT:-$BUNDLE}"
case "$OUT" in /*) ;; *) OUT="$PWD/$OUT" ;; esac # steps start tests in another folder
export SITE="$OUT/site"
if [ ! -e "$SITE/.unpacked" ]; then
  mkdir -p "$SITE"
  for wheel in "$BUNDLE"/wheels/*.whl; do
    if [ -e "$wheel" ]; then "${PYTHON:-python3}" -m zipfile -e "$wheel" "$SITE"; fi
  done
  touch "$SITE/.unpacked"
fi
export SITE="$SITE:$BUNDLE/package"
exec bash "$BUNDLE/code/scripts/gpu/run.sh" "$@"
RUN
size="$(du -sm "$out" | cut -f 1)"
echo "$out: $size MiB, commit $(cat "$out/commit")"
if [ -n "$(git status --porcelain --untracked-files=no)" ]; then echo "uncommitted changes are not in it" >&2; fi
if [ "$size" -gt "$most" ]; then echo "bundle.sh: that is more than $most MiB" >&2; exit 1; fi
