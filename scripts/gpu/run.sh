#!/usr/bin/env bash
# What a GPU has to say about this code, in steps of at most 150 seconds in order of worth:
#
#   bash scripts/gpu/run.sh [--tiny] [STEP ...]    # in a clone; in an unpacked bundle: bash run.sh
#
# Steps: equality rounding training generation families nf4 real_base comparison profile (default: all). Each figure is
# a line of OUT/results.jsonl (OUT: the bundle, or gpu-results in a clone), each step's output is in OUT/logs. The same
# command goes on where it was stopped; a case during which it was stopped comes after all steps. `--tiny` tries the
# steps on a CPU with tiny shapes. Variables: OUT; PYTHON; LIMIT, the seconds of a step; MODEL, the folder of a chat
# model for real_base and comparison.
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
  if [ -n "$(git -C "$root" status --porcelain --untracked-files=no 2> /dev/null || true)" ]; then
    commit="$commit-dirty"
  fi
fi
case "$out" in /*) ;; *) out="$PWD/$out" ;; esac
if ! "$python" -c "import tomllib" 2> /dev/null; then
  echo "run.sh: $python does not start, or is older than 3.11; name another as PYTHON=..." >&2
  exit 2
fi

known="equality rounding training generation families nf4 real_base comparison profile"
tiny=""
steps=""
for word in "$@"; do
  case " --tiny $known " in
    *" $word "*) if [ "$word" = --tiny ]; then tiny=--tiny; else steps="$steps $word"; fi ;;
    *)
      echo "run.sh: there is no step $word; known: $known, and the option --tiny" >&2
      exit 2
      ;;
  esac
done

card="$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -1 || true)"
conditions="$commit ${tiny:-full} ${card:-no GPU}"
limit="${LIMIT:-150}"
model="${MODEL:-}"
if [ -z "$model" ] && [ -d "$out/model" ]; then model="$out/model"; fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="${SITE:+$SITE}${SITE:+${PYTHONPATH:+:}}${PYTHONPATH:-}"
"$python" "$here/present.py"
mkdir -p "$out/logs"

open=0
last=""
# measure STEP leave|only: its cases but for those that were cut off before, or these alone
measure() {
  local step="$1" code=0 log="$out/logs/$1.log" skipped case
  timeout --kill-after=5 "$limit" "$python" "$here/step.py" "$step" $tiny --results "$out/results.jsonl" \
    --limit "$((limit * 9 / 10))" --commit "$commit" --cut-off "$2" ${model:+--model "$model"} > "$log" 2>&1 || code=$?
  case "$code" in
    0)
      skipped="$(grep -m1 ': skipped, ' "$log" || true)"
      if grep -q ': cut off before, ' "$log"; then
        if [ -z "$skipped" ]; then echo "$conditions" > "$out/logs/$step.last"; fi
        last="$last $step"
      elif [ -z "$skipped" ]; then
        echo "$conditions" > "$out/logs/$step.done"
        echo "$step: done"
      fi
      if [ -n "$skipped" ]; then echo "$step: $skipped"; fi
      ;;
    75) echo "$step: time is up; the same command goes on"; open=1 ;;
    124 | 137)
      case="$(sed -n 's/^begin //p' "$log" | tail -n 1)"
      case="${case:+ in \"$case\", which comes last next time (LIMIT=$((limit * 2)) gives it longer)}"
      echo "$step: stopped after $limit seconds$case, see logs/$step.log; the same command goes on"
      open=1
      ;;
    *)
      echo "$step: failed, see $log"
      if grep -q ': cut off before, ' "$log"; then last="$last $step"; fi
      open=1
      ;;
  esac
}

for step in ${steps:-$known}; do
  if [ "$(cat "$out/logs/$step.done" 2> /dev/null)" = "$conditions" ]; then
    echo "$step: done before"
  elif [ "$(cat "$out/logs/$step.last" 2> /dev/null)" = "$conditions" ]; then
    last="$last $step"
  else
    measure "$step" leave
  fi
done
for step in $last; do
  echo "$step: what was cut off before comes last"
  measure "$step" only
done
echo "figures: $out/results.jsonl"
exit "$open"
