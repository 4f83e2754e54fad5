#!/usr/bin/env bash
# What a GPU has to say about this code, in steps of at most 100 seconds in order of worth:
#
#   bash scripts/gpu/run.sh [--tiny] [STEP ...]    # in a clone; in an unpacked bundle: bash run.sh
#
# Steps: equality families training generation start evidence large (default: all). Each figure is a line of
# OUT/results.jsonl (OUT: the bundle, or gpu-results in a clone), each step's output is in OUT/logs. The same command goes
# on where it was stopped; a case during which it was stopped comes last in its step. `--tiny` tries the steps on a CPU.
# Variables: OUT; PYTHON; LIMIT, the seconds of a step; MODEL, the folder of a chat model; EVIDENCE, the data of Flan.
# Afterwards: python scripts/gpu/table.py OUT/results.jsonl
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname "$(dirname "$here")")"

if [ -n "${BUNDLE:-}" ]; then
  out="${OUT:-$BUNDLE}"
  python="${PYTHON:-python3}"
  commit="$(cat "$BUNDLE/commit")"
else
  out="${OUT:-$root/gpu-results}"
  python="${PYTHON:-$root/.venv/bin/python}"
  commit="$(git -C "$root" rev-parse --short=12 HEAD 2> /dev/null || echo unknown)"
  if [ -n "$(git -C "$root" status --porcelain --untracked-files=no 2> /dev/null || true)" ]; then commit="$commit-dirty"; fi
fi
case "$out" in /*) ;; *) out="$PWD/$out" ;; esac
if ! "$python" -c "import tomllib" 2> /dev/null; then
  echo "run.sh: $python does not start, or is older than 3.11; name another as PYTHON=..." >&2
  exit 2
fi

known="equality families training generation start evidence large"
tiny="" steps=""
for word in "$@"; do
  case " --tiny $known " in
    *" $word "*) if [ "$word" = --tiny ]; then tiny=--tiny; else steps="$steps $word"; fi ;;
    *) echo "run.sh: there is no step $word; known: $known, and the option --tiny" >&2; exit 2 ;;
  esac
done

limit="${LIMIT:-100}"
model="${MODEL:-}"
if [ -z "$model" ] && [ -d "$out/model" ]; then model="$out/model"; fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="${SITE:+$SITE}${SITE:+${PYTHONPATH:+:}}${PYTHONPATH:-}"
"$python" "$here/packages.py" present
mkdir -p "$out/logs"

open=0
for step in ${steps:-$known}; do
  code=0 log="$out/logs/$step.log"
  timeout --kill-after=5 "$limit" "$python" "$here/step.py" "$step" $tiny --results "$out/results.jsonl" \
    --limit "$((limit * 9 / 10))" --commit "$commit" ${model:+--model "$model"} > "$log" 2>&1 || code=$?
  skipped="$(grep -m1 ': skipped, ' "$log" || true)"
  case "$code" in
    0) echo "$step: ${skipped:-done}" ;;
    75) echo "$step: time is up; the same command goes on"; open=1 ;;
    124 | 137)
      case="$(sed -n 's/^begin //p' "$log" | tail -n 1)"
      echo "$step: stopped after $limit seconds${case:+ in \"$case\"}, see logs/$step.log; the same command goes on"
      open=1
      ;;
    *) echo "$step: failed, see $log"; open=1 ;;
  esac
done
echo "figures: $out/results.jsonl"
exit "$open"
