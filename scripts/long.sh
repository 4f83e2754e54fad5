#!/usr/bin/env bash
# What is too long for every change (`make long`): slow tests, answers, configurations and files that nobody honest gives,
# federations in random forms of files, rows beside others in every family of models, kills, full disks, flipped bits,
# damaged folders, links, the soak, the quickstart at three seeds, both server-side benchmarks, and all tests with the
# lowest versions of dependencies.
# With LLM_FED_BASE and LLM_FED_DATA set, also the benchmarks of cohorts, experts and mixing weights on real data.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# Older libraries, which read what is exported; without a package index those tests are skipped.
if "$bin/python" -m pip install --quiet ${PIPFLAGS:-} --no-deps --target "$work/older" transformers==4.57.3 \
  tokenizers==0.22.1 huggingface_hub==0.36.0 peft==0.18.0; then
  export LLM_FED_OLDER="$work/older"
fi
"$bin/python" -m pytest -m slow -rs
PYTHONPATH=tests/support "$bin/python" tests/support/hostile.py --examples 200000 --out "$work/hostile"
PYTHONPATH=tests/support "$bin/python" tests/support/hostile_answers.py
for kind in configurations folders data; do
  PYTHONPATH=tests/support "$bin/python" tests/support/fuzz.py "$kind" --cases 10000 --out "$work/fuzzed"
done
PYTHONPATH=tests/support "$bin/python" tests/support/federations.py --cases 5000 --out "$work/misread"
# With LLM_FED_WILD set to a folder whose bases/ holds real tokenizers, also with these.
PYTHONPATH=tests/support "$bin/python" tests/support/talks.py --cases 20000 \
  ${LLM_FED_WILD:+--bases "$LLM_FED_WILD/bases"}
PYTHONPATH=tests/support "$bin/python" tests/support/rows_alone.py
PYTHONPATH=tests/support "$bin/python" tests/support/disk_faults.py kills
PYTHONPATH=tests/support "$bin/python" tests/support/disk_faults.py full
PYTHONPATH=tests/support "$bin/python" tests/support/flips.py --cases 2000
PYTHONPATH=tests/support "$bin/python" tests/support/damage.py --cases 2000
PYTHONPATH=tests/support "$bin/python" tests/support/links.py
"$bin/python" scripts/bench/soak.py
for seed in 0 1 2; do
  "$bin/llm-fed" quickstart --seed "$seed" --out "$work/quickstart-$seed"
done
"$bin/python" scripts/bench/overhead.py "$work"/quickstart-0/*/
"$bin/python" scripts/bench/server.py
if [ -n "${LLM_FED_BASE:-}" ] && [ -n "${LLM_FED_DATA:-}" ]; then
  flan=(--base "$LLM_FED_BASE" --data "$LLM_FED_DATA/flan/dataset1")
  "$bin/python" scripts/bench/cohort.py "${flan[@]}" --steps 4 --repeats 3
  "$bin/python" scripts/bench/experts.py "${flan[@]}" --steps 4 --repeats 2
  "$bin/python" scripts/bench/fisher.py "${flan[@]}" --samples 8 --repeats 2
else
  echo "LLM_FED_BASE and LLM_FED_DATA are not set: the benchmarks on real data are skipped"
fi
# The commands of docs/tutorial.md, with few steps; the base comes from packages of PyPI.
(
  PATH="$(cd "$bin" && pwd):$PATH"
  repository="$PWD"
  cd "$work" && ln -s "$repository/scripts" scripts
  python scripts/evidence/smollm2.py SMOLLM2
  python scripts/default/federations.py desks --kind styles --clients 5 --examples 58 78 --seed 4711
  llm-fed init desks --base SMOLLM2 --yes
  short=(base.dtype=bfloat16 rounds=1 local.steps=1 eval.limit=2 eval.every=0 eval.select=last)
  llm-fed run desks.yaml "${short[@]}" --out runs/desks
  echo "What are the rules for a room for our group?" | llm-fed chat runs/desks --client library
  llm-fed compare desks.yaml "${short[@]}" --methods local,fedlora --out runs/table
)
# Cases that people report elsewhere, with real tokenizers, where a checkout of them lies beside this one.
for cases in ../shared/wild ../shared/wild2; do
  if [ -n "${LLM_FED_WILD:-}" ] && [ -f "$cases/run_all.sh" ]; then
    LLM_FED="$PWD/$bin/llm-fed" PY="$PWD/$bin/python" WILD="$LLM_FED_WILD" bash "$cases/run_all.sh"
  else
    echo "LLM_FED_WILD is not set, or there is no $cases: these cases are skipped"
  fi
done
bash scripts/lowest.sh
