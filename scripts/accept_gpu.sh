#!/usr/bin/env bash
# Everything that was never run on a GPU, in order of worth, on the day when there is one:
#
#   bash scripts/accept_gpu.sh [RESULTS]
#
# Each step has ten minutes and a log in RESULTS (default: gpu-results). A step that ended well is not run again, so the
# same command goes on where it was stopped. The logs hold the tables that docs/performance.md lacks. `DRY=1` prints the
# commands and runs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
results="${1:-gpu-results}"
mkdir -p "$results"
failed=0

step() { # NAME COMMAND...
  local name="$1"
  shift
  if [ -n "${DRY:-}" ]; then
    echo "$name: $*"
  elif [ -e "$results/$name.done" ]; then
    echo "$name: done before"
  elif timeout 600 "$@" > "$results/$name.log" 2>&1; then
    touch "$results/$name.done"
    echo "$name: done, see $results/$name.log"
  else
    echo "$name: ended with $?, see $results/$name.log"
    failed=1
  fi
}

gpus() {
  "$bin/python" -c "import torch; print(torch.cuda.device_count())"
}

if [ -z "${DRY:-}" ] && [ "$(gpus)" = 0 ]; then
  echo "torch sees no GPU here" >&2
  exit 1
fi

step tests "$bin/python" -m pytest -n 0 -m gpu
step doctor "$bin/llm-fed" doctor # how packing comes out, too
step cohort "$bin/python" scripts/bench/cohort.py --shapes llama-3.2-3b --device cuda --dtype bfloat16 \
  --steps 4 20 --repeats 3
for shapes in llama-3.2-3b qwen3-4b; do
  step "fisher-$shapes" "$bin/python" scripts/bench/fisher.py --shapes "$shapes" --device cuda --dtype bfloat16 \
    --samples 8 --repeats 3
done
step vision-adapters "$bin/python" scripts/bench/vision_adapters.py --device cuda
step vision "$bin/python" scripts/bench/vision.py --device cuda
step search "$bin/python" scripts/bench/search.py --device cuda
step quickstart "$bin/llm-fed" quickstart --seed 0 --out "$results/quickstart"
if [ -n "${DRY:-}" ] || [ "$(gpus)" -gt 1 ]; then
  step two-ranks "$bin/accelerate" launch --num_processes 2 scripts/train.py llm_fed/assets/quickstart.yaml \
    base.name=llm_fed/assets/tiny-base --out "$results/two-ranks"
fi
exit "$failed"
